"""What lesson 16 claims: five ways to send and receive give the library's sum, at a known cost.

The script knows nothing of this file; see lesson_02.py. Which messages its ranks send, and what
rank 0 prints, is seen. A run has one number of ranks, and does not show who forgets to wait. So
threads play 1 to 8 ranks with the script's functions (played_messages.py), also with few numbers.
Times are the script's own, as rank 0 tells them: who measured them again would measure others.
"""

from itertools import chain, product

import lesson_16_all_reduce as lesson
import torch
from lockstep.watch import claims
from lockstep.watch.played_messages import Stuck, on_a_clock, play, same

KEEP_VALUES = 1  # messages are told for a proof
LIMITS = {"--steps": (1, 10**4), "--batch-size": (1, 10**4), "--seed": (0, 2**32 - 1)}
POWER_OF_TWO = ("doubling", "halving")
PLAYED = range(1, 9)  # ranks
CASES = [(numbers, torch.float32) for numbers in (0, 1, 2, 10, 1003)]  # n does not divide them
CASES += [(10, torch.float64)]


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    for megabytes in args.megabytes:
        if not 0 <= megabytes <= 1000:
            return f"argument --megabytes: must be a number from 0 to 1000, not {megabytes:g}"
    if not chosen(args.algorithm, world_size)[0]:
        return f"argument --algorithm: {args.algorithm} needs a power of two, and not {world_size}"
    return None


def chosen(algorithm, ranks):
    """Return the names of the algorithms to run, and of those that this number does not allow."""
    wanted = list(lesson.ALGORITHMS) if algorithm == "all" else [algorithm]
    left_out = [name for name in wanted if name in POWER_OF_TWO and ranks & (ranks - 1)]
    return [name for name in wanted if name not in left_out], left_out


def numbers_in(megabytes):
    """Return how many numbers the script adds up in tensors of these sizes."""
    return [max(1, round(size * 1e6 / 4)) for size in megabytes]


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    names, left_out = chosen(args.algorithm, started)
    claim, sums = ", ".join(names), "the library's sum"
    table = read_table(job, [*names, "library"], args.megabytes)
    numbers = {"world_size": started, "backend": job[0].group["backend"]}
    numbers |= {"device": "cuda" if numbers["backend"] == "nccl" else "cpu"}
    numbers |= {"megabytes": args.megabytes, "algorithms": names}
    wrong = [claims.wrong_in_group(job, started), wrong_in_words(job, table, numbers)]
    wrong, counts = list(filter(None, wrong)), {}
    for name in names:
        wrong = wrong or wrong_when_played(name)
    for name in names if not wrong else ():
        counts[name], faults = count_calls(job, name, args)
        wrong += faults
    numbers["same_bits"] = not any("bits" in fault for fault in wrong)
    if wrong:
        return claims.Verdict(f"{claim}: {sums}", wrong[:3], numbers, [])
    numbers["bytes_busiest"] = {name: [sent for sent, *_ in counts[name]] for name in names}
    numbers["messages_busiest"] = {name: counts[name][0][1] for name in names}  # at any size
    numbers["rounds"] = {name: counts[name][0][2] for name in names}
    numbers["milliseconds"] = {name: [ms for ms, _, _ in rows] for name, rows in table.items()}
    numbers["max_diff"] = off = claims.worst([off for rows in table.values() for _, off, _ in rows])
    claim = f"{claim}: {sums} (off by {off:.2g}), same bits on all ranks"
    return claims.Verdict(claim, [], numbers, lines_of(numbers, left_out))


def lines_of(numbers, left_out):
    """Return a table for each size: what the busiest rank sends, and how many rounds it takes."""
    lines = []
    for place, megabytes in enumerate(numbers["megabytes"]):
        lines.append(f"{megabytes:g} MB".ljust(12) + "    messages            bytes         rounds")
        for name in numbers["algorithms"]:
            messages, rounds = (numbers[what][name] for what in ("messages_busiest", "rounds"))
            sent = numbers["bytes_busiest"][name][place]
            lines.append(f"{name:12}{messages:12}{sent:17,}{rounds:15}")
    words = f"need a power of two, and not {numbers['world_size']} ranks: left out"
    return [*lines, f"{' and '.join(left_out)} {words}"] if left_out else lines


# --- What rank 0 tells ---


def read_table(job, names, megabytes):
    """Return {name: [(milliseconds, off, between ranks) at each size]}; None if it isn't told."""
    rows = [event["text"].split() for event in job[0].of("said")[1:]]
    titles = [title for size in megabytes for title in (f"{size:g}", *names)]
    if [row[0] for row in rows] != titles or any(len(row) < 4 for row in rows):
        return None
    return {name: [tuple(map(float, row[1:4])) for row in rows if row[0] == name] for name in names}


def wrong_in_words(job, table, numbers):
    """Rank 0 alone has told where it ran, and sums that are the library's, alike on all ranks."""
    n = numbers["world_size"]
    said = {rank: [event["text"] for event in seen.of("said")] for rank, seen in job.items()}
    where = f"{n} ranks over {numbers['backend']} on {numbers['device']}"
    if table is None or said.pop(0)[0] != where or any(said.values()):
        return f"what the ranks say is not one table, by rank 0, of {where}"
    for name, rows in table.items():
        for _, off, between in rows:
            if not off <= 6 * n * n * torch.finfo(torch.float32).eps:  # of n numbers below 6
                return f"{name}: the sum is not the library's, it says: off by {off:g}"
            if between != 0:
                return f"{name}: the ranks differ in their bits, it says: by {between:g}"
    return None


# --- What is sent ---


def budget(name, n, numbers):
    """Return the formulas: (numbers that the busiest rank sends, its messages, rounds, of all).

    The last are the messages of all ranks.
    """
    steps = (n - 1).bit_length()  # how often 1 must be doubled to reach n
    halves = [-(-numbers // 2**k) for k in range(steps)]  # rounded up
    neighbours = numbers // n + (numbers + 1) // n  # two chunks that a rank does not send
    return {
        "naive": ((n - 1) * numbers, n - 1, 2 * (n - 1), 2 * (n - 1)),
        "tree": (steps * numbers, steps, 2 * steps, 2 * (n - 1)),
        "doubling": (steps * numbers, steps, steps, n * steps),
        "halving": (sum(halves), 2 * steps, 2 * steps, 2 * n * steps),
        "ring": ((2 * numbers - neighbours) * (n > 1), 2 * (n - 1), 2 * (n - 1), 2 * n * (n - 1)),
    }[name]


def count(name, everyone, numbers, item):
    """Return what is counted in the rounds of all ranks, as in budget() but in bytes, and faults.

    A number has `item` bytes.
    """
    n, messages = len(everyone), on_a_clock(everyone)
    sent = [[op for ops in rounds for op in ops if op[0]] for rounds in everyone]
    nbytes = max(sum(size for *_, size in ops) for ops in sent)
    rounds = max((end for end, *_ in messages), default=0) if messages is not None else None
    counted = nbytes, max(map(len, sent)), rounds, sum(map(len, sent))
    sends, *others = budget(name, n, numbers)
    wanted = (sends * item, *others)
    words = "{:,} bytes in {} messages, in {} rounds, of {} messages in all"
    told = f"the busiest rank sends {words.format(*counted)}, and not {words.format(*wanted)}"
    to_right = all(op[1] == (rank + 1) % n for rank, ops in enumerate(sent) for op in ops)
    rules = {told: counted == wanted}
    rules["a message goes to another rank than the right neighbour"] = name != "ring" or to_right
    return counted, [f"{name}: {fault}" for fault in claims.broken(rules)]


def count_calls(job, name, args):
    """Return what was counted in the run at each size, and faults."""
    code = lesson.ALGORITHMS[name].__code__
    lines = range(code.co_firstlineno, max(line for *_, line in code.co_lines() if line) + 1)
    sizes, times = numbers_in(args.megabytes), (args.steps + 1) * args.batch_size + 1
    everyone = []
    for rank, seen in job.items():
        calls = [c for c in seen.calls if any(int(w.split(":")[-1]) in lines for w in c["way"])]
        rounds = [[tuple(op) for op in call.get("ops", ())] for call in calls]
        each = len(rounds) // (len(sizes) * times)
        parts = [rounds[i * each : (i + 1) * each] for i in range(len(sizes) * times)]
        alike = all(part == parts[i - i % times] for i, part in enumerate(parts))
        if not alike or each * len(parts) != len(rounds):
            return [], [f"{name}, rank {rank}: its calls do not all send the same messages"]
        everyone.append(parts[::times])
    of_sizes = zip(sizes, zip(*everyone, strict=True), strict=True)
    found = [count(name, of_all, numbers, 4) for numbers, of_all in of_sizes]
    return [counted for counted, _ in found], [*chain(*(faults for _, faults in found))]


# --- What threads play ---


def add_up(name, n, numbers, kind=torch.float32):
    """Let threads play n ranks that add up; return (what each did, the sum, rounding at most)."""
    tensors = [lesson.make_tensor(numbers, rank).to(kind) for rank in range(n)]
    exact = torch.stack(tensors).double()

    def act(rank, world_size):
        lesson.ALGORITHMS[name](tensors[rank])
        return tensors[rank]

    return play(n, act), exact.sum(0), n * torch.finfo(kind).eps * exact.abs().sum(0)


def wrong_when_played(name):
    """Return what is wrong with an algorithm, in the first case in which something is."""
    for n, (numbers, kind) in product(PLAYED, CASES):
        ranks, right, rounding = add_up(name, n, numbers, kind)
        errors = [rank.error for rank in ranks if rank.error]
        if name in POWER_OF_TWO and n & (n - 1):
            refused = [type(error) for error in errors] == [ValueError] * n
            rules = {"it is not refused": refused and not any(rank.rounds for rank in ranks)}
        elif errors:
            first = min(errors, key=lambda error: isinstance(error, Stuck))
            rules = {f"{type(first).__name__}: {first}": False}
        else:
            sums = [rank.value for rank in ranks]
            faults = count(name, [rank.rounds for rank in ranks], numbers, kind.itemsize)[1]
            rules = {
                "the sum is not right": all(((s - right).abs() <= rounding).all() for s in sums),
                "the ranks differ in their bits": all(same(s, sums[0]) for s in sums),
            }
            rules |= dict.fromkeys([*chain(*(rank.wrong for rank in ranks)), *faults], False)
        if wrong := claims.broken(rules):
            return [f"{name}, played by {n} ranks, {numbers:,} numbers: {each}" for each in wrong]
    return []
