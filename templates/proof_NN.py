"""What lesson NN claims, as lessons/proofs/lesson_NN.py: the ranks add up their numbers.

The script knows nothing of this file. Its ranks have written down what they did (lockstep.watch).
"""

import lesson_NN_slug as lesson  # noqa: F401  (the launcher reads its flags)
from lockstep.watch import claims

KEEP_VALUES = 1  # of every update
LIMITS = {"--seed": (0, 2**32 - 1)}


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    by_hand = started * (started - 1) // 2
    said = [event["text"].rpartition(" ")[2] for event in job[0].of("said")]
    numbers = {"world_size": started, "total": int(said[-1]) if said else None}
    rules = {
        "the sum is another one": numbers["total"] == by_hand,
        "a rank has called something else than one all-reduce": all(
            [call["name"] for call in rank.calls] == ["all_reduce"] for rank in job.values()
        ),
    }
    wrong = [claims.wrong_in_group(job, started), *claims.broken(rules)]
    claim = f"the sum over {started} ranks is {numbers['total']}, computed by hand: {by_hand}"
    return claims.Verdict(claim, list(filter(None, wrong)), numbers, [])
