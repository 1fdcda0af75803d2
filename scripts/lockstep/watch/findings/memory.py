"""What each rank keeps of parameters, gradients and optimizer states, and what is not sharded."""

from lockstep.watch.findings import NOT_MEANT, TO_KNOW, some

KINDS = ("parameters", "gradients", "optimizer")


def memory(job, report):
    """Compare the ranks' bytes; say what is whole on each rank beside shards."""
    ranks = [rank for rank in job.values() if rank.memory]
    if not ranks or len(ranks) < len(job):
        return
    kept = [rank.memory for rank in ranks]
    said = ", ".join(f"{kind} {shown([one[kind] for one in kept])}" for kind in KINDS)
    report.look(f"memory of what is trained, by rank: {said}")
    place = ranks[0].updates[0]["where"] if ranks[0].updates else None
    totals = [sum(one[kind] for kind in KINDS) for one in kept]
    if max(totals) > 1.5 * min(totals):
        text = f"the ranks keep {shown(totals)} of parameters, gradients and optimizer states"
        report.found("memory differs", TO_KNOW, text, place, [totals.index(max(totals))])
    if whole := min(one["whole"] for one in kept):
        text = f"each rank keeps {shown([whole])} of optimizer states whole, of sharded parameters"
        report.found("whole beside shards", TO_KNOW, text, place)
    if len(ranks) > 1 and all(rank.updates for rank in ranks):
        judge_left_out(ranks, report)


def judge_left_out(ranks, report):
    """Say which parameters are whole on each rank, beside sharded ones, and part in update 1."""
    first = [rank.updates[0] for rank in ranks]
    about = [rank.optimizers[u["optimizer"]] for rank, u in zip(ranks, first, strict=True)]
    if any(one["names"] != about[0]["names"] for one in about) or not any(about[0]["shards"]):
        return
    columns = enumerate(zip(about[0]["names"], about[0]["shards"], strict=True))
    whole = [(n, name) for n, (name, is_shard) in columns if not is_shard]
    values = {when: [{u[when][n] for u in first} for n, _ in whole] for when in ("before", "after")}
    pairs = zip(whole, values["before"], values["after"], strict=True)
    apart = [name for (_, name), old, new in pairs if len(old) == 1 < len(new)]
    if apart:
        text = f"{some(apart)} of a sharded model are not sharded, so nobody averages the gradients"
        text += " (right, if each rank is to have its own)"
        report.found("left out of sharding", NOT_MEANT, text, first[0]["where"])


def shown(numbers):
    """Return bytes in words: one number, if all ranks have the same."""
    words = [f"{n:,} bytes" if n < 10**5 else f"{n / 1e6:,.1f} MB" for n in numbers]
    return words[0] if len(set(numbers)) == 1 else " and ".join(words)
