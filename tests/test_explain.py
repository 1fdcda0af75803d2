"""explain: which rank failed first, and why, from the log of a job."""

import gzip
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, finish, start_program
from lockstep import errors, explain, job_log

ROOT = Path(__file__).resolve().parent.parent
PAGE = errors.read_page()


def told(text):
    """Return what explain says of a log, as one text."""
    log = job_log.Log(PAGE)
    log.read(io.BytesIO(text.encode()))
    return "\n".join(explain.tell(log))


# --- The page ---


def test_each_message_of_the_page_is_found_with_what_stands_around_it():
    for entry in PAGE:
        for wording in entry.wordings:
            words = wording.words.replace("…", "/data/run 7/x.pt")
            line = f"[rank3]: RuntimeError: [/src/pair.cc:553] {words}, after 1800000ms\n"
            log = job_log.Log(PAGE)
            log.read(io.BytesIO(line.encode()))
            assert [said.entry for said in log.said] == [entry], wording.words


# --- Logs ---

TORCHRUN = """\
W1127 13:41:35.686000 17 torch/distributed/run.py:874] *****************************************
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 41, in load
[rank0]:   File "/home/a/train.py", line 60, in <module>
[rank0]:     loss.backward()
[rank1]:     return images[name]
[rank1]: KeyError: 'cat'
[rank0]:   File "/x/lib/python3.11/site-packages/torch/autograd/graph.py", line 9, in backward
[rank0]: RuntimeError: [/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9435.
E1127 13:41:59.254000 17 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/x/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  time      : 2026-11-27_13:41:59
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 172)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_13:41:59
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 171)
"""
KILLED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 60, in <module>
[rank0]: RuntimeError: [/src/gloo/pair.cc:553] Connection reset by peer
Failures:
[1]:
  time      : 2026-11-27_13:45:44
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 23228)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_13:45:44
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 23229)  (SIGKILL)
"""
SPAWNED = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 9, in <module>
    mp.spawn(train, nprocs=2)
  File "/x/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 215, in join
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/x/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 88, in _wrap
    fn(i, *args)
  File "/home/a/train.py", line 4, in train
    raise ValueError("no such digit")
ValueError: no such digit
"""
LABELLED = """\
0: epoch 1
1: epoch 1
0: Traceback (most recent call last):
1: Traceback (most recent call last):
0:   File "/home/a/train.py", line 60, in <module>
1:   File "/home/a/train.py", line 12, in <module>
0: RuntimeError: Timed out waiting 1800000ms for recv operation to complete
1: FileNotFoundError: [Errno 2] No such file or directory: '/scratch/part-1.npy'
1: slurmstepd: error: *** STEP 7.0 ON node2 CANCELLED ***
"""
ALL_WAIT = """\
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Timed out waiting 60000ms for recv operation to complete
  time      : 2026-11-27_13:45:44
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 23229)
  time      : 2026-11-27_13:45:44
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 23228)
"""
NOT_ALIKE = """\
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while \
rank 1 has inconsistent 4 params.
[rank1]: Traceback (most recent call last):
[rank1]: RuntimeError: DDP expects same model across all ranks, but Rank 1 has 4 params, while \
rank 0 has inconsistent 2 params.
"""
CHAINED = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/a/data.py", line 7, in read
[rank2]: OSError: [Errno 5] Input/output error: 'a.png'

[rank2]: The above exception was the direct cause of the following exception:

[rank2]: Traceback (most recent call last):
[rank2]:   File "/home/a/train.py", line 30, in <module>
[rank2]: RuntimeError: the data set could not be read
"""
IN_TABLE = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_13:41:59
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 171)
  error_file: /tmp/torchelastic/error.json
  traceback : Traceback (most recent call last):
    File "/home/a/train.py", line 44, in main
      model.hidden
  AttributeError: 'DistributedDataParallel' object has no attribute 'hidden'
"""
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the tasks are dead.\n"
COLOURED = """\
\r 98%|##| 98/100 [00:12<00:01]\r\x1b[31m[rank1]: Traceback (most recent call last):\x1b[0m
\r 99%|##| 99/100 [00:12<00:01]\r\x1b[31m[rank1]: \x1b[1mKeyError\x1b[0m: 'cat'\x1b[0m
"""
TWO_MACHINES = """\
Root Cause (first observed failure):
  time      : 2026-11-27_13:45:52
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 19414)
Root Cause (first observed failure):
  time      : 2026-11-27_13:45:01
  rank      : 4 (local_rank: 0)
  exitcode  : 1 (pid: 19401)
"""
ONE_LINE = """\
W1127 13:45:51.6 14 torch/distributed/elastic/api.py:851] Sending process 2 closing signal SIGTERM
E1127 13:45:52.7 14 torch/distributed/api.py:826] failed (exitcode: -9) local_rank: 1 (pid: 3)
"""
DEEPSPEED = """\
  0%|     | 0/17 [00:00<?]\r[2026-11-27 13:45:51,090] [INFO] [launch.py:315] Killing subprocess 27
[2026-11-27 13:45:51,716] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py', \
'--local_rank=3', '--deepspeed', 'config.json'] exits with return code = -7
"""
OF_SRUN = """\
srun: error: node7: task 2: Out Of Memory
srun: error: node3: tasks 0-1: Terminated
slurmstepd: error: *** STEP 9.0 ON node7 CANCELLED AT 2026-11-27T13:45:51 ***
"""
MPIRUN = """\
[1,1]<stderr>:Traceback (most recent call last):
[1,1]<stderr>:  File "/home/a/train.py", line 8, in <module>
[1,1]<stderr>:RuntimeError: Horovod has been shut down. This was caused by an exception
mpirun detected that one or more processes exited with non-zero status. The first to do so was:
  Process name: [[50371,1],0]
"""
HOSTS = """\
gpu003: epoch 1
node-12: epoch 1
node-12: Traceback (most recent call last):
gpu003: Traceback (most recent call last):
node-12:   File "/home/a/train.py", line 9, in <module>
gpu003:   File "/home/a/train.py", line 30, in <module>
gpu003: RuntimeError: [11] is setting up NCCL communicator and retrieving ncclUniqueId from [0]
node-12: KeyError: 'cat'
"""
OF_NCCL = """\
node7:63025:66048 [0] misc/socket.cc:49 NCCL WARN Connection closed by remote peer node8<51159>
node7:63028:66152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'
"""
SPAWNED_AND_KILLED = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 9, in <module>
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV
"""
PASTED = """\
[rank1]:   File "/home/a/train.py", line 9, in <module>
[rank1]:     raise RuntimeError(f"Missing key in checkpoint state_dict: {name}.")
[rank1]: RuntimeError: Missing key in checkpoint state_dict: head.
"""
STOPPED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 9, in <module>
[rank1]: StopIteration
[rank1]:[W1127 13:41:36 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group() was not called
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Timed out waiting 60000ms for recv operation to complete
"""
IGNORES_SIGTERM = """\
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Timed out waiting 60000ms for recv operation to complete
  time      : 2026-11-27_13:46:15
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 9)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 9
  time      : 2026-11-27_13:45:44
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 8)
"""
OF_A_TOOL = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 12, in <module>
[rank1]: subprocess.CalledProcessError: Command '['tar', 'xf', 'data.tar']' returned 2.
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: [/src/pair.cc:553] Connection closed by peer
"""
GROUP = """\
[rank1]:   + Exception Group Traceback (most recent call last):
[rank1]:   |   File "/home/a/train.py", line 60, in <module>
[rank1]:   | ExceptionGroup: readers (1 sub-exception)
[rank1]:   +-+---------------- 1 ----------------
[rank1]:     | OSError: [Errno 5] Input/output error: 'a.png'
[rank1]:     +------------------------------------
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: [/src/pair.cc:553] Connection closed by peer
"""
DOWNLOAD = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/data.py", line 41, in get
[rank1]: requests.exceptions.ConnectionError: (104, 'Connection reset by peer')
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Timed out waiting 60000ms for recv operation to complete
"""
WORDS_OF_A_PROGRAM = """\
epoch 2 | Errors: Too many open files: 0, Broken pipe: 0
Error caught was: No module named 'triton'
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 4, in <module>
[rank1]: ModuleNotFoundError: No module named 'apex'
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 60, in <module>
[rank1]: ZeroDivisionError: division by zero
[rank1]: Exception ignored in: <function Reader.__del__ at 0x7f>
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/data.py", line 70, in __del__
[rank1]: AttributeError: 'Reader' object has no attribute 'file'
"""
HEALTHY = 200 * WORDS_OF_A_PROGRAM[: WORDS_OF_A_PROGRAM.index("[rank1]")]
VICTIM_FIRST = """\
[rank0]: Traceback (most recent call last):
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3353, remote \
process exited or there was a network error, NCCL version 2.27.5
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 4, in <module>
[rank1]: KeyError: 'cat'
terminate called without an active exception
"""
CTRL_C = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 60, in <module>
[rank0]: KeyboardInterrupt
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.api.SignalException: Process 28556 got signal: 2
"""
AN_ERROR_BY_FLAG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 4, in <module>
[rank1]: UserWarning: This DataLoader will create 64 worker processes in total.
"""
ODD_TABLES = """\
  time : 3.2s
  rank      : 5 (local_rank: 1)
  exitcode  : -35 (pid: 23229)
  rank : abc
"""
AT_THE_END = """\
trained
terminate called without an active exception
  time      : 2026-11-27_14:53:44
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 27463)  (SIGABRT)
"""
NOT_IN_THE_FIRST_LINE = """\
> torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, invalid usage
> ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
> Last error:
> Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000
"""
IN_A_FILE = """\
{
  "message": {
    "message": "RendezvousConnectionError: The connection to the C10d store has failed."
"""
BEHIND_A_BAR = """\
Epoch 0:  6%|#  | 32040/500150 [6:28:43<94:39:17, 1.37it/s][E ProcessGroupNCCL.cpp:458] [Rank 7] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, OpType=ALLREDUCE)
"""
OLD_SPAWN = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
Exception:

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/home/a/train.py", line 4, in train
KeyError: 'car'
"""
CUT_BY_A_TERMINAL = """\
[2023-11-13 16:59:55,650] [ERROR] [launch.py:320:sigkill_handler] ['python', '--local_rank=1', '--a
', './log_rest/'
] exits with return code = -9
"""
THREE_OF_FOUR = """\
[rank2]:[E ProcessGroupNCCL.cpp:563] [Rank 2] Watchdog caught collective operation timeout: Work
[rank3]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 3] Timeout at NCCL work: 19, last enqueued 19
[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 1] Timeout at NCCL work: 19, last enqueued 19
[rank2]:[E ProcessGroupNCCL.cpp:577] [Rank 2] Some NCCL operations have failed or timed out.
"""
REASON_BELOW = """\
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, internal error
[rank0]: ncclInternalError: Internal check failed.
[rank0]: Last error:
[rank0]: Bootstrap : no socket interface found
"""
HUNG_UP = """\
WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers
WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 7 closing signal SIGHUP
"""
RANK_IN_THE_MESSAGE = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 30, in <module>
RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] by key '0', \
but store->get('0') got error: Socket Timeout
"""
ON_WINDOWS = r"""
-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "D:\a\Python38\lib\site-packages\torch\multiprocessing\spawn.py", line 7, in _wrap
  File "D:\b\train.py", line 31, in main
    pool = Pool(3)
  File "C:\Users\b\anaconda3\lib\multiprocessing\pool.py", line 90, in __init__
ValueError: no such pool
"""
CUT_PATHS = """\
Traceback (most recent call last):
  File "model.py", line 12, in forward
    return encoder.hidden
  File "torch/nn/modules/module.py", line 8, in __getattr__
AttributeError: 'DistributedDataParallel' object has no attribute 'hidden'
"""
IN_BOXES = """\
╭────── Traceback (most recent call last) ──────╮
│ /home/a/train.py:31 in main                    │
│                                                │
│   30 │   rows = read()                          │
│ ❱ 31 │   model(rows)                            │
│                                                │
│ /x/lib/python3.11/site-packages/torch/a.py:5   │
│ in call                                        │
╰────────────────────────────────────────────────╯
ValueError: no rows
"""
IN_A_NOTEBOOK = """\
ValueError                                Traceback (most recent call last)
Cell In[3], line 1
----> 1 trainer.train()

File ~/course/trainer.py:88, in Trainer.train(self)
     87 def train(self):
---> 88     raise ValueError("no rows")

File /x/lib/python3.11/site-packages/torch/a.py:5, in call(rows)
      4     (...)
ValueError: no rows
"""
OLD_NCCL = """\
    work = group.broadcast([tensor], options)
RuntimeError: NCCL error in: /src/ProcessGroupNCCL.cpp:911, invalid usage, NCCL version 2.7.8
RuntimeError: RuntimeErrorNCCL error in: /src/ProcessGroupNCCL.cpp:911, invalid usage, NCCL version
ncclInvalidUsage: This usually reflects invalid usage of NCCL library (such as too many calls).
"""
A_NEW_GPU = """\
/x/torch/cuda/__init__.py:100: UserWarning:
NVIDIA B7 with CUDA capability sm_700 is not compatible with the current PyTorch installation.
node1:31:31 [0] NCCL WARN Cuda failure 'named symbol not found'
RuntimeError: NCCL Error 1: unhandled cuda error
"""
BROKEN_BY_A_BOX = """\
╰─────────────────╯
RuntimeError: loss: element 0 of tensors
does not require grad and has no grad_fn
epoch 3
"""
A_ROLL_CALL = """\
[E ProcessGroupGloo.cpp:12] Rank 1 successfully reached monitoredBarrier, but received errors while
[E ProcessGroupGloo.cpp:12] [Rank 0]: Rank 3 failed to pass monitoredBarrier in 5000 ms
"""
NO_SCRIPT = """\
/x/bin/python: can't open file '/home/a/trian.py': [Errno 2] No such file or directory
E1127 13:45:52.7 14 torch/distributed/api.py:826] failed (exitcode: 2) local_rank: 1 (pid: 3)
"""
BEFORE_TORCHRUN = """\
Traceback (most recent call last):
  File "/x/lib/python3.7/site-packages/torch/distributed/launch.py", line 25, in main
subprocess.CalledProcessError: Command '['/x/bin/python3', '-u', 'train.py', '--local_rank=5', \
'--lr', '0.5']' died with <Signals.SIGKILL: 9>.
"""
OF_ACCELERATE = "Command '['/x/bin/python', 'train.py']' died with <Signals.SIGSEGV: 11>.\n"
OF_LIGHTNING = """\
[rank: 3] Child process with PID 77 terminated with code -9. Forcefully terminating all other
"""
NO_DRIVER = """\
/x/torch/cuda/__init__.py:7: UserWarning: CUDA initialization: The NVIDIA driver on your system is \
too old (found version 9999). (Triggered internally at /src/CUDAFunctions.cpp:7.)
  return torch._C._cuda_getDeviceCount() > 0
"""
FULL_BEFORE = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/a/train.py", line 12, in main
[rank3]:     dist.barrier()
[rank3]: RuntimeError: CUDA error: out of memory
[rank3]: CUDA kernel errors might be asynchronously reported at some other API call
[rank0]: Traceback (most recent call last):
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:7, remote process \
exited or there was a network error, NCCL version 2.27.5
"""
SENT_IN_A_COLLECTIVE = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 10, in <module>
[rank0]:     dist.all_gather_object(results, {"rank": rank})
[rank0]: RuntimeError: [/src/gloo/unbound_buffer.cc:129] Timed out waiting 12000ms for send \
operation to complete
"""
ENDED_WELL = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 11, in <module>
[rank0]: RuntimeError: [/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9435.
"""
EMPTY = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/a/train.py", line 8, in <module>
[rank1]:     torch.load(path)
[rank1]: EOFError
"""
WORDS_OF_LOAD = (
    "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format. "
    "In PyTorch 2.6, we changed the default value"
)
TORN = EMPTY.replace("EOFError", WORDS_OF_LOAD)
OF_A_LIBRARY = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 12, in main
    loss.backward()
RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
"""
CUT_IN_THE_MIDDLE = "ERROR:torch.distributed.elastic.api:failed (exitcode: -9) local_ranka/bin\n"
LOGS = {
    "a warning from which errors follow": (
        NO_DRIVER,
        r"a process .* may have failed: (.|\n)*A newer driver",
    ),
    "a GPU that others have filled": (
        FULL_BEFORE,
        r"rank 3 failed: .*\n.*train.py:12, in main(.|\n)*an earlier job(.|\n)*"
        r"rank 0 only felt it",
    ),
    "a collective, which sends": (
        SENT_IN_A_COLLECTIVE,
        r"rank 0 waited in vain(.|\n)*do: (.|\n)*If it calls a\s+collective: find out which rank",
    ),
    "the rank that left says nothing": (
        ENDED_WELL,
        r"rank 0 (.|\n)*it had fewer\s+batches(.|\n)*all\s+must\s+make\s+the\s+same\s+calls",
    ),
    "an empty file": (EMPTY, r"rank 1 failed: EOFError(.|\n)*several\s+ranks\s+write"),
    "a torn file": (TORN, r"rank 1 failed: (.|\n)*several\s+ranks\s+write"),
    "a library of the GPU": (OF_A_LIBRARY, r"a process .* failed: (.|\n)*smaller batch"),
    "a message that a box broke": (
        BROKEN_BY_A_BOX,
        r"a process .*failed: Run(.|\n)*use_reentrant=False",
    ),
    "a roll call": (A_ROLL_CALL, r"rank 0 waited in vain(.|\n)*more batches or fewer"),
    "no such script": (NO_SCRIPT, r"a process .*failed: (.|\n)*does not find the script"),
    "of a launcher before torchrun": (BEFORE_TORCHRUN, r"local rank 5 failed: exitcode : -9"),
    "accelerate's": (OF_ACCELERATE, r"a process .* failed: exitcode : -11"),
    "Lightning's": (OF_LIGHTNING, r"rank 3 failed: exitcode : -9"),
    "torchrun's, cut in the middle": (CUT_IN_THE_MIDDLE, r"a process .* failed: exitcode : -9"),
    "of Windows": (ON_WINDOWS, r"process 1 failed: ValueError(.|\n)*\(train.py:31, in main;"),
    "paths that begin with torch": (CUT_PATHS, r"a process .* failed(.|\n)*model.py:12, in forw"),
    "in boxes": (IN_BOXES, r"a process .* failed: ValueError: no rows\n.*train.py:31, in main;"),
    "of a notebook": (IN_A_NOTEBOOK, r"a process .* failed: ValueError(.|\n)*trainer.py:88, in T"),
    "an old nccl without its reason": (OLD_NCCL, r"a process .*failed(.|\n)*than GPUs"),
    "a GPU newer than PyTorch": (
        A_NEW_GPU,
        r"a process .* failed: .*cuda error(.|\n)*names for your GPU",
    ),
    "the terminal was closed": (HUNG_UP, r"a process .* failed:(.|\n)*tmux"),
    "the rank is in the message": (
        RANK_IN_THE_MESSAGE,
        r"rank 1 waited(.|\n)*\n  not a word of rank 0:",
    ),
    "nccl's reason in the last line": (
        REASON_BELOW,
        r"(.|\n)*NCCL_SOCKET_IFNAME(.|\n)*brief address",
    ),
    "a command cut by a terminal": (CUT_BY_A_TERMINAL, r"local rank 1 failed: exitcode : -9"),
    "one of four says nothing": (
        THREE_OF_FOUR,
        r"rank 1, 2, 3 waited(.|\n)*\n  not a word of rank 0:(?!(.|\n)*only felt)",
    ),
    "behind a quotation mark": (
        "`ValueError: no cat`\n",
        r"a process .* failed: ValueError: no cat",
    ),
    "in a sentence": (
        "here is the error: **RuntimeError: DataLoader worker (pid 9) exited unexpectedly**\n",
        r"a process .* failed: (.|\n)*docker run",
    ),
    "the words alone": (
        "DataLoader worker (pid 9) is killed by signal: Killed\n",
        r"(.|\n)*memory",
    ),
    "its fourth line": (NOT_IN_THE_FIRST_LINE, r"(.|\n)*LOCAL_RANK(.|\n)*Meeting"),
    "torchrun's file of errors": (IN_A_FILE, r"a process .* waited in vain(.|\n)*--rdzv-endpoint"),
    "behind a progress bar": (BEHIND_A_BAR, r"rank 7 waited .*\s+\[E(.|\n)*lesson 19"),
    "of mp.spawn in old days": (
        OLD_SPAWN,
        r"process 0 failed: KeyError: 'car'(.|\n)*imports the script",
    ),
    "C++'s word at the end": (AT_THE_END, r"(?!(.|\n)*not a word)(.|\n)*: terminate called"),
    "an exception of another name, and a warning": (STOPPED, r"rank 1 failed: StopIteration\n"),
    "a rank that torchrun had to kill": (IGNORES_SIGTERM, r"rank 0 waited in vain"),
    "another program's error": (OF_A_TOOL, r"rank 1 failed: subprocess.CalledProcessError"),
    "a group of errors": (GROUP, r"rank 1 failed: OSError(.|\n)*rank 0 only felt it"),
    "a connection of one's own": (
        DOWNLOAD,
        r"rank 1 failed: requests.*Conn(.|\n)*rank 0 only felt",
    ),
    "what a program says of errors": (WORDS_OF_A_PROGRAM, r"rank 1 failed: ZeroDivisionError"),
    "a job without errors": (HEALTHY, r"no process tells of an error"),
    "the victim comes first": (VICTIM_FIRST, r"rank 1 failed: KeyError(.|\n)*rank 0 only felt it"),
    "Ctrl-C": (CTRL_C, r"(.|\n)*got signal: 2(.|\n)*rank 0 only felt it: KeyboardInterrupt.*:60"),
    "a warning made an error": (AN_ERROR_BY_FLAG, r"rank 1 failed: UserWarning"),
    "a table that is none": (ODD_TABLES, r"rank 5 failed: exitcode : -35\n"),
    "tables of two machines": (
        TWO_MACHINES,
        r"rank 4 ended first \(exitcode : 1\), and says nothing",
    ),
    "torchrun's line without its table": (
        ONE_LINE,
        r"local rank 1 failed: exitcode : -9 \(SIGKILL\)",
    ),
    "DeepSpeed's launcher": (DEEPSPEED, r"local rank 3 failed: exitcode : -7(.|\n)*/dev/shm"),
    "srun's": (OF_SRUN, r"task 2 failed: exitcode : -9(.|\n)*memory was full"),
    "mpirun's": (
        MPIRUN,
        r"rank 1 told only what follows from(.|\n)*not a word of rank 0: ",
    ),
    "of pdsh": (HOSTS, r"host node-12 failed: KeyError(.|\n)*rank 11 only felt it: is setting"),
    "nccl's own": (OF_NCCL, r"local rank 3 failed: .*Cuda(.|\n)*local rank 0 only felt it: Conn"),
    "of a spawned process that was killed": (
        SPAWNED_AND_KILLED,
        r"process 1 failed: exitcode : -11",
    ),
    "pasted without its head": (
        PASTED,
        r"rank 1 failed: RuntimeError: Missing key(.|\n)*train.py:9",
    ),
    "an error of a line alone": (
        "ValueError: no cat\n",
        r"a process .* failed: ValueError: no cat",
    ),
    "torchrun's, whose table names the wrong rank": (
        TORCHRUN,
        r"rank 1 failed: KeyError: 'cat'\n.*train.py:41, in load; line 8 of(.|\n)*Nothing is known"
        r"(.|\n)*\nrank 0 only felt it: Connection closed by peer \(train.py:60, in",
    ),
    "a rank is killed": (
        KILLED,
        r"rank 5 failed: exitcode : -9 \(SIGKILL\)\n(.|\n)*rank 0 only felt",
    ),
    "mp.spawn's": (SPAWNED, r"process 1 failed: ValueError: no such digit\n.*train.py:4, in train"),
    "of srun --label": (
        LABELLED,
        r"task 1 failed: FileNotFound(.|\n)*train.py:12(.|\n)*task 0 only felt it: Timed out",
    ),
    "all wait, one is silent": (
        ALL_WAIT,
        r"rank 0 waited in vain, and no rank in this log says why:(.|\n)*not a word of rank 1: ",
    ),
    "the ranks differ": (
        NOT_ALIKE,
        r"rank 0, 1 met another rank in the wrong call; either of them",
    ),
    "an error of an error": (
        CHAINED,
        r"rank 2 failed: OSError(.|\n)*data.py:7(.|\n)*rank 2 also said: RuntimeError: the",
    ),
    "the traceback is in the table": (IN_TABLE, r"rank 3 failed: AttributeError(.|\n)*train.py:44"),
    "Slurm's own": (
        OOM,
        r"a process that does not tell its rank failed: slurmstepd(.|\n)*lesson 19",
    ),
    "a launcher's of this course": (
        "rank 2 failed: ValueError: no such digit\n",
        r"rank 2 failed: ValueError: no such digit\n",
    ),
    "coloured, after a progress bar": (COLOURED, r"rank 1 failed: KeyError: 'cat'"),
    "nothing went wrong": (
        "epoch 1\nepoch 2\n",
        r"no process tells of an error in 2 lines\n(.|\n)*stands still",
    ),
    "cut in the middle": (TORCHRUN[:480], r"rank 1 failed: KeyError: 'cat'"),
    "cut before the error": (
        TORCHRUN[:300],
        r"no process tells of an error(.|\n)*but the log ends in the middle",
    ),
}


def test_an_error_comes_before_the_warning_from_which_it_may_follow():
    said = told(NO_DRIVER + "Traceback (most recent call last):\nValueError: no GPU\n")
    assert re.match(r"a process .* failed: ValueError(.|\n)*also said: The NVIDIA driver", said)


@pytest.mark.parametrize("log", LOGS)
def test_a_log_says_who_and_why(log):
    text, wanted = LOGS[log]
    assert re.match(wanted, told(text)), told(text)


def test_what_is_found_in_a_piece_is_found_in_a_long_log():
    """Of a long log only the lines with a telling word are looked at."""
    metrics = "step 12 loss 0.25\n" * 2000
    by_first_lines = {"of srun --label", "of pdsh"}  # they tell that each line has a mark
    by_hand = {"the words alone", "cut before the error"}
    for name in LOGS.keys() - by_first_lines - by_hand:
        text, wanted = LOGS[name]
        first = told(text).splitlines()[0]
        if not first.startswith("no process"):
            assert told(metrics + text).splitlines()[0] == first, name
            assert re.match(wanted, told(text + metrics)), (name, told(text + metrics))


def test_what_windows_and_containers_put_around_each_line_does_not_matter():
    for before in (
        "2026-11-27T13:41:35.123Z stderr F ",
        "2026-11-27 13:41:35,123 ",
        "worker-1  | ",
    ):
        for after in ("\n", "\r\n"):
            text = re.sub("^", before, SPAWNED, flags=re.MULTILINE).replace("\n", after)
            assert re.match(LOGS["mp.spawn's"][1], told(text)), told(text)


# --- The command ---


def explain_it(*names, **options):
    return finish(start_program("bash", ROOT / "scripts" / "explain.sh", *names, **options))


BAD = {
    "nosuch.txt": "No such file or directory",
    "empty.txt": "is empty",
    "a folder": "is a folder",
    "log.txt.gz": "is compressed: unpack it first",
    "core": "is no text",
}


def test_bad_input_costs_one_line(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "log.txt.gz").write_bytes(gzip.compress(b"a log"))
    (tmp_path / "core").write_bytes(b"\x7fELF\0\0\1")
    for name, problem in BAD.items():
        ended = explain_it(tmp_path / name)
        assert (ended.returncode, ended.stdout) == (2, ""), name
        assert re.fullmatch(f"explain: error: .*{problem}.*\n", ended.stderr), ended.stderr


MEASURED = """
import resource, sys
from lockstep import explain

explain.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
with open("/proc/self/status") as status:  # getrusage would say what our parent had, too
    print(*[line.split()[1] for line in status if line.startswith("VmHWM")], file=sys.stderr)
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def cost_of(log):
    """Return (what explain says of a file, seconds of the processor, bytes of memory at most)."""
    command = [sys.executable, "-c", MEASURED, str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    seconds, kilobytes = ended.stderr.split()
    return ended.stdout, float(seconds), 1024 * int(kilobytes)


@on_linux
def test_a_long_log_costs_time_by_its_length_and_no_memory(tmp_path):
    """Progress bars, colours and metrics, 10 and 100 MB, then an error."""
    step = b"\x1b[32m[rank3]: epoch 3 loss=0.25 error rate 0.03 grad_norm 1.5\x1b[0m\n"
    bar = b"".join(b"\r %d%%|##  | %d/100 [00:12<00:01, 8.2it/s]" % (n, n) for n in range(40))
    part = (20 * step + bar + b"\n") * 3500
    costs = []
    for times in (1, 10):
        with open(tmp_path / "log.txt", "wb") as file:
            file.writelines([part] * times)
            file.write(KILLED.encode())
        words, *cost = cost_of(tmp_path / "log.txt")
        assert words.startswith("rank 5 failed: exitcode : -9 (SIGKILL)")
        costs.append(cost)
    (short, little), (long, much) = costs
    assert long < 15 * short
    assert much < little + 2**24 < 200e6


@on_linux
def test_ten_megabytes_without_a_line_s_end_cost_no_memory(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"\r 3%|#   | Error 7" * 2**20 + b"\n" + KILLED.encode())
    words, _, memory = cost_of(tmp_path / "log.txt")
    assert words.startswith("rank 5 failed") and memory < 100e6


# --- Real jobs ---

SCRIPT = """
import os, signal, time
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    {fault}
dist.barrier()
"""
FAULTS = {
    "an error of its own": ("{}['cat']", r"rank 1 failed: KeyError: 'cat'\n.*train.py:7"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 failed: exitcode : -9 \(SIGKILL\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_torchrun_prints_is_understood(fault, tmp_path):
    line, wanted = FAULTS[fault]
    (tmp_path / "train.py").write_text(SCRIPT.format(fault=line))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = finish(start_program(*torchrun, tmp_path / "train.py", cwd=tmp_path))
    (tmp_path / "log.txt").write_text(job.stdout + job.stderr)
    ended = explain_it(tmp_path / "log.txt")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.match(wanted, ended.stdout), ended.stdout + job.stderr
    assert "rank 0 only felt it" in ended.stdout or fault == "killed"
    assert "OMP_NUM_THREADS" in ended.stdout


SIGNALS = {"got signal: 1": (signal.SIGHUP, "tmux"), "got signal: 2": (signal.SIGINT, "Ctrl-C")}


@pytest.mark.parametrize("words", SIGNALS)
def test_a_pipe_is_read_and_the_signal_that_ended_torchrun_is_told(words, tmp_path):
    """SIGHUP comes when the terminal is closed."""
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    job = start_program(*torchrun, tmp_path / "train.py", cwd=tmp_path)
    assert job.stdout.readline() == "here\n"
    number, cure = SIGNALS[words]
    job.send_signal(number)
    log = finish(job).stderr
    command = ["bash", str(ROOT / "scripts" / "explain.sh")]
    options = {"capture_output": True, "text": True, "env": ENVIRONMENT}
    ended = subprocess.run(command, input=log, **options)
    assert f"{words}\n" in log and cure in ended.stdout, ended.stdout + log
