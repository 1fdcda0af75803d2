"""Machines made of one, on Linux, as root: what run.py, faults.py and slurm.py run on.

A machine is a set of namespaces: it has its own interfaces (eth0 is 10.14.0.1, 10.14.0.2 and so
on), host name, /etc/hosts and processes. Nothing of it has a name outside, so any number of runs
can go on at once. When the first process of a machine ends, Linux kills all others, and with the
last one the machine and its cable are gone, however the script that made it has ended. Two machines
share one cable; more than two have a cable each, to a switch, which is a machine without programs.
"""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

from lockstep import ending

ADDRESSES = tuple(f"10.14.0.{number}" for number in range(1, 65))  # of machine 0, 1, ...
PORT = 29500  # torchrun's own default; nobody else can have taken it on these machines


def end_with_us():
    """Let a program that we start be killed when we end, however we end."""
    ending.end_with_parent(signal.SIGKILL)


def call(*command):
    """Run a command; raises OSError with what it says if it fails."""
    run = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if run.returncode:
        raise OSError(f"{' '.join(run.args)[-80:]}: {run.stderr.strip()[:200]}")


class Machine:
    """Namespaces for network, host name, mounts and processes. `first` is their process 1."""

    def __init__(self, name, address=None):
        self.address, self.name = address, name
        command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["--mount-proc", "sh", "-c", "echo ready; exec sleep infinity"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.unshare = subprocess.Popen(command, preexec_fn=end_with_us, **streams)
        if self.unshare.stdout.readline() != b"ready\n":
            raise OSError("unshare could not make a machine: is this a container without rights?")
        children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children")
        self.first = children.read_text().split()[0]
        self.do("hostname", self.name)
        self.do("ip", "link", "set", "lo", "up")

    def enter(self, *command):
        """Return the command that runs `command` on this machine, in the folder we are in."""
        where = ["--net", "--uts", "--mount", "--pid", "--wd=."]
        return ["nsenter", f"--target={self.first}", *where, "--", *map(str, command)]

    def do(self, *command):
        """Run a command on this machine; raises OSError."""
        call(*self.enter(*command))

    def start(self, *command, **options):
        """Start a command on this machine; return the process."""
        options = {"preexec_fn": end_with_us, "stdin": subprocess.DEVNULL} | options
        return subprocess.Popen(self.enter(*command), **options)

    def names(self, folder, own=None):
        """Let this machine know all names; its own can have another address, as on Debian."""
        hosts = Path(folder, f"hosts_{self.name}")
        known = {f"machine{number}": address for number, address in enumerate(ADDRESSES)}
        known |= {self.name: own or self.address, "localhost": "127.0.0.1"}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        self.do("mount", "--bind", hosts, "/etc/hosts")
        switch = Path(folder, "nsswitch.conf")
        switch.write_text("hosts: files\n")  # there is no name server to wait for
        self.do("mount", "--bind", switch, "/etc/nsswitch.conf")

    def kill(self):
        """Pull the plug."""
        self.unshare.kill()  # and Linux kills the machine's process 1, and with it all others
        self.unshare.wait()
        self.unshare.stdout.close()


class Machines:
    """Some machines and their cables to a switch, for the length of a `with`. Raises OSError."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.machines = [self.make(number) for number in range(self.count)]
        self.switches = []
        self.connect()
        return self

    def make(self, number):
        """Return machine `number`, which has no cable yet."""
        return Machine(f"machine{number}", ADDRESSES[number])

    def connect(self):
        """Lay a cable from each machine to a switch, and give its end an address."""
        switch = Machine("switch")
        self.switches.append(switch)
        switch.do("ip", "link", "add", "bridge", "type", "bridge")
        switch.do("ip", "link", "set", "bridge", "up")
        for number, machine in enumerate(self.machines):
            port = f"port{number}"
            self.lay_a_cable((machine, "eth0"), (switch, port))
            switch.do("ip", "link", "set", port, "master", "bridge", "up")
            self.switch_on(machine)

    def lay_a_cable(self, one, other):
        """Join two machines: (machine, name of its interface) of each."""
        ends = [[name, "netns", machine.first] for machine, name in (one, other)]
        call("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])

    def switch_on(self, machine):
        """Give a machine's end of the cable its address, and let it know the others' names."""
        machine.do("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.do("ip", "link", "set", "eth0", "up")
        machine.names(self.folder)

    def environment(self):
        """Return our environment for programs on the machines: they share this one's cores.

        A program that is killed with its machine leaves its temporary files in our folder, which
        goes with us.
        """
        return {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(self.folder)}

    def __exit__(self, *error):
        for machine in [*self.machines, *self.switches]:
            machine.kill()
        self.temporary.cleanup()

    def limit(self, rate):
        """Let each machine send so many megabits per second. Raises OSError."""
        shape = ["tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "1s"]
        for machine in self.machines:
            machine.do("tc", "qdisc", "add", "dev", "eth0", "root", *shape)


class TwoMachines(Machines):
    """Two machines and the cable between them, for the length of a `with`. Raises OSError."""

    def __init__(self):
        super().__init__(2)

    def connect(self):
        """Lay one cable from machine to machine, and give its ends their addresses."""
        self.lay_a_cable(*[(machine, "eth0") for machine in self.machines])
        for machine in self.machines:
            self.switch_on(machine)

    def replace(self, number):
        """Put a new machine in the place of one that has been killed."""
        other = self.machines[1 - number]
        self.machines[number] = self.make(number)
        if Path(f"/proc/{other.first}/ns").exists():  # the end of the old cable
            subprocess.run(other.enter("ip", "link", "delete", "eth0"), capture_output=True)
        self.connect()

    def lead_nowhere(self, name, *addresses):
        """Give each machine an interface of this name; what is sent there to others is lost."""
        for machine, address in zip(self.machines, addresses, strict=True):
            machine.do("ip", "link", "add", name, "type", "veth", "peer", "name", "nowhere")
            machine.do("ip", "link", "set", name, "arp", "off", "up")
            machine.do("ip", "link", "set", "nowhere", "up")
            machine.do("ip", "address", "add", f"{address}/16", "dev", name)

    def kill(self):
        """Kill machine 1."""
        self.machines[1].kill()

    def cut(self):
        """Cut the cable; no process of either machine is told."""
        self.machines[1].do("ip", "link", "set", "eth0", "down")
