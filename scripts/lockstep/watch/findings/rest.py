"""The group, random numbers, collectives, files and output."""

from collections import Counter, defaultdict

from lockstep.watch.facts import ROOM
from lockstep.watch.findings import NOT_MEANT, TO_KNOW, WRONG
from lockstep.watch.messages import BETWEEN_TWO


def group(job, report, world):
    """Say who has joined a group, and which; return whether the ranks can be compared."""
    joined = [rank for rank, seen in job.items() if seen.group]
    trained = [rank for rank, seen in job.items() if seen.updates]
    if not joined and len(trained) > 1:
        place = job[trained[0]].updates[0]["where"]
        text = f"{len(trained)} processes train, and none has joined a group"
        report.found("no group", WRONG, text, place, trained)
        return False
    others = [rank for rank, seen in job.items() if not seen.group and seen.ended]
    if joined and others:  # who was ended from outside may have been about to join
        report.found(
            "no group", WRONG, f"of {len(job)} ranks {len(others)} joined no group", None, others
        )
    for rank in joined:
        size = job[rank].group["world"]
        if world and size != world:
            text = f"{world} ranks were started, and the group has {size}"
            report.found("another world", WRONG, text, job[rank].group["where"], [rank])
    return not any(one.kind == "another world" for one in report.findings)


def random_numbers(job, report):
    """Do all ranks draw the same numbers where they read rows, or for dropout masks?"""
    ranks = list(job.values())
    epochs = [next((e for e in rank.epochs if e["trains"]), None) for rank in ranks]
    if len(ranks) < 2:
        return
    drawn = [{pair for e in rank.drawn for pair in used(e, rank).items()} for rank in ranks]
    if all(drawn) and all(epochs):
        if same := set.intersection(*drawn):
            kinds = ", ".join(sorted({source for source, _ in same}))
            workers = any(e["worker"] and same & {*e["states"].items()} for e in ranks[0].drawn)
            who = "the workers of all ranks" if workers else "all ranks"
            text = f"{who} draw the same random numbers ({kinds}) for their rows"
            report.found("same random numbers", NOT_MEANT, text, epochs[0]["where"])
        elif same := drawn_by_several_workers(ranks[0]):
            text = f"the workers of a rank draw the same random numbers ({', '.join(same)})"
            report.found("same random numbers", NOT_MEANT, text, epochs[0]["where"])
    elif all(epochs):
        report.look("random numbers while rows are read: none of torch, numpy or random are drawn")
    masks = [[f["masks"] for f in rank.forwards if f.get("masks")] for rank in ranks]
    if len(masks[0]) > 1 and all(one == masks[0] for one in masks):
        place = next(f["where"] for f in ranks[0].forwards if f.get("masks"))
        text = "all ranks draw the same dropout masks: they have the same seed"
        report.found("same random numbers", TO_KNOW, text, place)


def used(event, rank):
    """Return the sources that were drawn from, without generators that only tests have."""
    own = {f"its own {name}" for e in rank.epochs if e["trains"] for name in e["own"]}
    states = event["states"].items()
    return {name: state for name, state in states if not name.startswith("its own") or name in own}


def drawn_by_several_workers(rank):
    """Return the sources from which several workers of a rank draw the same numbers."""
    seen = defaultdict(set)
    for event in rank.drawn:
        for pair in used(event, rank).items():
            seen[pair].add(event["number_of"])
    return sorted({source for (source, _), workers in seen.items() if len(workers - {None}) > 1})


def messages(job, report):
    """Compare the collectives that the script calls itself, group by group, in order."""
    if len(job) < 2:
        return
    groups = defaultdict(lambda: defaultdict(list))
    for rank, seen in job.items():
        for call in seen.calls:
            if call["own"] and call["name"] not in BETWEEN_TWO:
                members = tuple(call["members"] or sorted(job))
                groups[members][rank].append(call)
    for members, calls in groups.items():
        if len(members) > 1 and all(rank in job for rank in members):
            compare_calls({rank: calls[rank] for rank in members}, job, report)
    counts = [sum(call["own"] for call in seen.calls) for seen in job.values()]
    report.look(f"collectives that the script calls itself: {counts} by rank")


def compare_calls(calls, job, report):
    """Say where the calls of the ranks of one group first differ."""
    for number in range(max(map(len, calls.values()))):
        here = {r: of[number] if number < len(of) else None for r, of in calls.items()}
        if failed := [rank for rank, call in here.items() if call is None and job[rank].error]:
            return report.not_seen(f"collectives after the error of rank {failed[0]}")
        if any(call is None and not job[rank].ended for rank, call in here.items()):
            if report.stopped:
                return None  # a rank that died calls no more
            words = [f"rank {rank} {said(call)}" for rank, call in here.items()]
            text = f"when the run ended, collective {number + 1} was not called by all:"
            place = next(call["where"] for call in here.values() if call)
            text += f" {'; '.join(words)} (or it would have come later)"
            return report.found("messages differ", NOT_MEANT, text, place)
        if len({key(call) for call in here.values()}) > 1:
            words = [f"rank {rank} {said(call)}" for rank, call in here.items()]
            ways = {tuple(call["way"]) for call in here.values() if call}
            text = f"collective {number + 1} is not the same: {'; '.join(words)}"
            place = rarest(ways, calls) or next(call["where"] for call in here.values() if call)
            return report.found("messages differ", WRONG, text, place)
        ways = {tuple(call["way"]) for call in here.values()}
        if len(ways) > 1 and next(iter(here.values()))["name"] in ("all_reduce", "all_gather"):
            words = [f"rank {rank} {said(call)}" for rank, call in here.items()]
            text = f"collective {number + 1} is called from several lines: {'; '.join(words)}"
            return report.found("messages differ", NOT_MEANT, text, rarest(ways, calls))
    return None


def rarest(ways, calls):
    """Return the line, of those at which these ways part, to which the fewest ranks ever come.

    If that are all, it is the line to which they come the most unequal numbers of times.
    """
    took = [Counter(line for call in of for line in call["way"]) for of in calls.values()]

    def place(line):
        times = [of[line] for of in took]
        return sum(map(bool, times)), min(times) - max(times)

    lines = sorted(set.union(*map(set, ways)) - set.intersection(*map(set, ways)))
    return min(lines, key=place, default=None)


def key(call):
    """Return what must be the same on all ranks of a collective."""
    if call is None:
        return None
    free = any(word in call["name"] for word in ("gather", "scatter", "all_to_all", "object"))
    return call["name"], None if free else str(call["shape"])


def said(call):
    """Return a call in words."""
    if call is None:
        return "calls nothing"
    shape = f" of {call['shape'][0] or 'one number'}" if call["shape"] else ""
    callers = f" (called at {', '.join(call['way'][1:])})" if call["way"][1:] else ""
    return f"calls {call['name']}{shape} at {call['where']}{callers}"


def files(job, report):
    """Say which files several ranks write, and whether names in a checkpoint have a prefix."""
    writers = defaultdict(dict)
    for rank, seen in job.items():
        for event in [*seen.of("save"), *seen.of("write")]:
            if event["path"]:
                writers[event["path"]][rank] = event["where"]
        for event in seen.of("save"):
            if event["prefix"]:
                text = 'the names that are saved begin with "module.", which is DDP\'s'
                report.found("module. in names", TO_KNOW, text, event["where"])
    boards = defaultdict(dict)
    for rank, seen in job.items():
        for event in seen.of("board"):
            boards[event["folder"]][rank] = event["where"]
    for folder, who in boards.items():
        if len(who) > 1:
            ranks = ", ".join(map(str, sorted(who)))
            text = f"ranks {ranks} each write for TensorBoard into {folder.rpartition('/')[2]}/"
            report.found("several boards", NOT_MEANT, text, who[min(who)], sorted(who))
    for path, who in writers.items():
        if len(who) > 1:
            name, ranks = path.rpartition("/")[2], ", ".join(map(str, sorted(who)))
            text = f"ranks {ranks} write the same file {name}"
            first = who[min(who)]
            report.found("one file, several writers", NOT_MEANT, text, first, sorted(who))


def left_out(job, report):
    """Say what was not looked at because a run was long, or a model large."""
    words = {"updates": "updates after the first {} of a rank"}
    words["rows"] = "rows after the first {:,} of a loader, or of a line that calls a model"
    words["forwards"] = "calls of a model after the first {:,} at a line"
    words["calls"] = "collectives after the first {:,} of a group"
    for seen in job.values():
        for kind in seen.left_out:
            most = f"{len(seen.updates):,}" if kind == "updates" else ROOM[kind]
            report.not_seen(words[kind].format(most))
        for model in seen.models.values():
            if model["most"]:
                text = f"each number of {model['type']}: it has {model['size']:,}, and of a tensor"
                report.not_seen(f"{text} {model['most']:,} are compared at most")


def output(job, report):
    """Say which lines several ranks print."""
    places = defaultdict(set)
    for rank, seen in job.items():
        for event in seen.of("print"):
            places[event["where"]].add(rank)
    loud = [place for place, who in places.items() if len(who) > 1]
    if loud:
        text = f"printed by {len(job)} ranks: {', '.join(loud[:4])}"
        report.found("printed by several ranks", TO_KNOW, text, loud[0])
