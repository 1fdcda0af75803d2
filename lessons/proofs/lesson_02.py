"""What lesson 02 claims: the ranks hold one model after each update, trained on all rows.

The script knows nothing of this file. Its ranks have written down what they did (lockstep.watch):
which rows each asked for, and the gradient and parameters of every update. Here one process makes
each update again, with the rows of all ranks.
"""

import lesson_02_launch_ddp as lesson
import torch
from lockstep.watch import claims
from torch.nn.functional import mse_loss

KEEP_VALUES = 1  # of every update
LIMITS = {"--steps": (1, 10**5), "--batch-size": (1, 10**6), "--seed": (0, 2**32 - 1)}
LIMITS["--local-rank"] = (0, 63)


def refuse(args, world_size, ranks_here):
    """Return why these flags can't work on so many ranks, or None."""
    gpus = torch.cuda.device_count()
    if args.batch_size < world_size:
        return f"argument --batch-size: must be at least the number of ranks, {world_size}"
    if args.backend == "nccl" and (gpus < ranks_here or not torch.distributed.is_nccl_available()):
        wanted = f"nccl needs a GPU for each of {ranks_here} ranks"
        return f"argument --backend: {wanted}; there are {gpus}"
    return None


def against_one_process(job, rows, targets, model):
    """Return how far each gradient, and each update, is from that of one process on all rows."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients_off, updates_off = [], []
    for step in claims.steps(job):
        batch = [row for update in step for row in update["asked"]]
        values = [rank.values(update) for rank, update in zip(job.values(), step, strict=True)]
        claims.fill(model, values[0]["before"])
        sgd.zero_grad()
        mse_loss(model(rows[batch]), targets[batch]).backward()
        gradient = claims.numbers_of(model, lambda parameter: parameter.grad)
        sgd.step()
        updated = claims.numbers_of(model, lambda parameter: parameter)
        for of_rank in values:
            gradients_off.append(claims.off(claims.as_vector(of_rank["gradients"]), gradient))
            updates_off.append(claims.off(claims.as_vector(of_rank["after"]), updated))
    return gradients_off, updates_off


def judge(job, args, started, launcher):
    """Return the verdict on a job {rank: what was seen of it} of which so many were started."""
    rows, targets, model = lesson.make_toy(args.seed)
    if wrong := claims.wrong_in_optimizer(job, model):
        return claims.Verdict("the ranks train one model", [wrong], {}, [])
    losses = loss_before_and_after(job, rows, targets, model)
    gradients_off, updates_off = against_one_process(job, rows, targets, model)
    spreads = claims.spreads(job)
    rules = {
        "a gradient is not that of the whole batch": all(off < 1e-12 for off in gradients_off),
        "an update is not that of one process": all(off < 1e-12 for off in updates_off),
        "the loss has not fallen": losses[1] < losses[0],
    }
    wrong = claims.broken(rules)
    wrong += [claims.wrong_in_count(job, args.steps), claims.wrong_in_group(job, started)]
    wrong += [claims.wrong_in_replicas(job), claims.wrong_in_rows(job, 100, args.batch_size)]
    numbers = numbers_of(job, args, launcher) | {"world_size": started, "param_spread": spreads}
    numbers |= {"max_grad_diff": claims.worst(gradients_off)}
    numbers |= {"loss_first": losses[0], "loss_last": losses[1]}
    wrong += [claims.wrong_in_words(job, words_of(numbers, args.steps))]
    claim = f"the parameters of {started} ranks differ by {claims.worst(spreads)}"
    claim += f" after each of {args.steps} steps"
    return claims.Verdict(claim, list(filter(None, wrong)), numbers, lines_of(numbers))


def loss_before_and_after(job, rows, targets, model):
    """Return the loss of rank 0's model on all rows, before the first update and after the last."""
    losses = []
    for number, when in ((0, "before"), (-1, "after")):
        claims.fill(model, job[0].values(job[0].updates[number])[when])
        losses.append(mse_loss(model(rows), targets).item())
    return losses


def numbers_of(job, args, launcher):
    """Return the numbers for --json that need no second look."""
    ranks = list(job.values())
    per_epoch = claims.steps_per_epoch(100, len(job), args.batch_size)
    taken = [[len(update["asked"]) for update in rank.updates[:per_epoch]] for rank in ranks]
    return {
        "launcher": launcher,
        "backend": ranks[0].group["backend"],
        "device": ranks[0].optimizers[0]["device"],
        "environment": [rank.group["environment"] for rank in ranks],
        "rows_per_rank": taken,
    }


def words_of(numbers, steps):
    """Return the lines that rank 0 must have printed, and nobody else."""
    where = f"over {numbers['backend']} on {numbers['device']}"
    losses = f"{numbers['loss_first']:.3g} before, {numbers['loss_last']:.3g} after {steps} steps"
    equal = claims.worst(numbers["param_spread"]) == 0
    words = "agree" if equal else "DIFFER"
    return [
        f"ranks: {numbers['world_size']}, {where}",
        f"loss on all 100 rows: {losses}; the replicas {words}",
    ]


def lines_of(numbers):
    """Return what a reader wants to know beside the script's own words, rank by rank."""
    names, lines = ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"), []
    for rank, environment in enumerate(numbers["environment"]):
        shown = " ".join(f"{name}={environment[name]}" for name in names)
        rows = " ".join(map(str, numbers["rows_per_rank"][rank]))
        lines.append(f"rank {rank}: {shown}, rows per step {rows}")
    worst = f"max difference {numbers['max_grad_diff']:.3g}"
    return [*lines, f"gradient against the whole batch's: {worst}"]
