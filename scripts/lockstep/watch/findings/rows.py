"""Which rows the ranks train on, and evaluate on."""

from collections import Counter, defaultdict
from itertools import chain

from lockstep.watch.findings import NOT_MEANT, TO_KNOW, WRONG, sharded, share_rows

BY_LABELS = ", by their labels (right, if labels only number the rows of a part)"
PARTS = "rows: the same on all ranks, as it should be where they hold parts of the same layers"


def flat(batches):
    """Return the rows of several batches in one list."""
    return list(chain(*batches))


def numbers(job, report):
    """Compare the row numbers that the loaders asked for, epoch by epoch."""
    ranks = list(job.values())
    epochs = list(zip(*([e for e in rank.epochs if e["trains"]] for rank in ranks), strict=False))
    known = [of for of in epochs if all(None not in one["batches"] for one in of)]
    if not all(rank.updates for rank in ranks):
        return report.not_seen("row numbers: not all ranks have made an update")
    if not epochs:
        return report.not_seen("row numbers: no DataLoader was used in training")
    if not known:
        return report.not_seen("row numbers: an IterableDataset has none; contents were compared")
    before = {}
    for number, of_ranks in enumerate(known):
        epoch = Epoch(number, of_ranks, ranks)
        epoch.judge(report)
        if epoch.comparable():
            epoch.judge_order(report, before.get(of_ranks[0]["loader"]))
            before[of_ranks[0]["loader"]] = epoch
    judge_early_ends(known, report)
    counts = [len(flat(flat(e["batches"] for e in one))) for one in zip(*known, strict=True)]
    report.look(f"row numbers in {len(known)} training epochs: {counts} by rank")
    if len(known) < 2:
        report.not_seen("whether a second epoch has a new order: there was one epoch")
    return None


class Epoch:
    """One training epoch of a loader, on all ranks."""

    def __init__(self, number, of_ranks, ranks):
        self.number, self.of_ranks, self.ranks = number, of_ranks, ranks
        self.first, self.place = of_ranks[0], of_ranks[0]["where"]
        self.dealt = [flat(one["batches"]) for one in of_ranks]
        self.all = flat(self.dealt)
        longest, rows = max(map(len, self.dealt)), self.first["rows"]
        self.drawn = self.first["replaces"] or "Weighted" in self.first["sampler"]
        self.drawn |= bool(rows) and longest > rows  # more than an epoch: they must come again
        self.torch = self.first["replicas"] is not None or self.first["sampler"].endswith("Sampler")
        self.parts = len({one["part"] for one in of_ranks}) > 1
        self.same = same_data(ranks, self.first["loader"]) if len(ranks) > 1 else "same"

    def comparable(self):
        """Return whether a number means the same row on all ranks, as far as can be seen."""
        return self.same in ("same", "unknown") or self.first["replicas"] is not None

    def judge(self, report):
        """Look at one epoch alone."""
        if not self.comparable():
            return report.look("each rank has rows of its own: numbers can't be compared")
        if self.same in ("other", "perhaps other"):
            strength = WRONG if self.same == "other" else NOT_MEANT
            text = f"{self.first['sampler']} deals from one order, but a number means another row"
            why = "" if strength == WRONG else " (or rows are drawn anew when they are read)"
            report.found("other data", strength, f"{text} on each rank{why}", self.place)
        if len(self.ranks) > 1:
            self.judge_shares(report)
        if not self.drawn and all(one["over"] for one in self.of_ranks) and not self.parts:
            never = (self.first["rows"] or 0) - len(set(self.all))
            if self.first["rows"] and never > 0 and len(self.all) == len(set(self.all)):
                text = f"{never} of {self.first['rows']} rows did not come in epoch {self.number}"
                report.found("rows left out", TO_KNOW, text, self.place)
        return None

    def judge_shares(self, report):
        """Compare the rows of the ranks."""
        strength = WRONG if share_rows(self.ranks) else NOT_MEANT
        other = "" if strength == WRONG else " (right, if they share each layer's work)"
        count, rows = len(self.dealt[0]), self.first["rows"]
        again = len(self.all) - len(set(self.all))
        padding = -(rows or 0) % len(self.ranks) if self.first["replicas"] else 0
        inside = max(len(one) - len(set(one)) for one in self.dealt)
        if count and all(one == self.dealt[0] for one in self.dealt):
            if strength == NOT_MEANT and sharded(self.ranks):
                return report.look(PARTS)
            text = f"all ranks trained on the same {count:,} rows in epoch {self.number}{other}"
            report.found("same rows", strength, text, self.place)
        elif self.drawn or again <= padding:
            self.judge_sizes(report)
        elif count and not inside and self.everything_on_each(rows):
            text = (
                f"each rank went through all {rows or count:,} rows in epoch {self.number}{other}"
            )
            report.found("all rows on each rank", strength, text, self.place)
        else:
            text = f"{again:,} {'row' if again == 1 else 'rows'} came twice in epoch {self.number}"
            known = self.first["replicas"] is not None
            if self.parts and known:
                text += ": the data is a Subset with other rows on each rank (random_split?)"
                return report.found("other data", WRONG, text, self.place)
            why = "" if known else ", or the sampler repeats rows on purpose"
            text += f": do the ranks deal from one order?{why}"
            report.found("rows twice", WRONG if known else NOT_MEANT, text, self.place)
        return None

    def everything_on_each(self, rows):
        """Return whether each rank has, or was about to have, all rows."""
        if self.first["replicas"] is not None:
            return False
        over = all(one["over"] for one in self.of_ranks)
        sizes = {len(one) for one in self.dealt}
        if over:
            return sizes == {rows} if rows else len(set(map(frozenset, self.dealt))) == 1
        return not self.parts and self.first["sampler"] in ("RandomSampler", "SequentialSampler")

    def judge_sizes(self, report):
        """Compare how many rows the ranks have in a step."""
        sizes = zip(*(map(len, one["batches"]) for one in self.of_ranks), strict=False)
        for step, counts in enumerate(sizes, 1):
            if len(set(counts)) > 1:
                text = f"ranks had {', '.join(map(str, counts))} rows in step {step} of epoch"
                text += f" {self.number}, and each row of the fewer counts more in the mean"
                return report.found("uneven rows", TO_KNOW, text, self.place)
        return None

    def judge_order(self, report, old):
        """Compare with the epoch before of the same loader."""
        count = min(len(old.dealt[0]), len(self.dealt[0])) if old else 0
        pairs = zip(old.dealt, self.dealt, strict=True) if old else ()
        if count < 4 or not all(a[:count] == b[:count] for a, b in pairs):
            return
        text = f"epoch {self.number} has the order of epoch {old.number}"
        if self.first["sampler"] == "SequentialSampler" or self.first["shuffle"] is False:
            report.found("not shuffled", TO_KNOW, f"{text}: rows are not shuffled", self.place)
        else:
            report.found("order repeats", NOT_MEANT, f"{text}, on each rank", self.place)


def judge_early_ends(epochs, report):
    """Say where an epoch was left before its end, and another one began."""
    for number, of_ranks in enumerate(epochs[:-1]):
        first = of_ranks[0]
        later = any(other[0]["loader"] == first["loader"] for other in epochs[number + 1 :])
        if later and not any(one["over"] for one in of_ranks) and first["batches"]:
            text = f"epoch {number} was left after {len(first['batches'])} batches"
            report.found("epoch left early", TO_KNOW, text, first["where"])


def same_data(ranks, loader):
    """Return whether a number means one row on all ranks: same, other, perhaps other, unknown."""
    seen = [rank.seen.get(loader, {}) for rank in ranks]
    rows = [row for row in seen[0] if all(row in other for other in seen)]
    drawn = any(rank.drawn for rank in ranks)
    twice = [(one, given_twice(rank, loader)) for rank, one in zip(ranks, seen, strict=True)]
    verdicts = []
    for part in (1,) if drawn else (0, 1):
        views = [one[row][part] for one, again in twice for row in again if row in one]
        if all(len(view) == 1 for view in views):  # else it is drawn anew when a row is read
            verdicts.append(compare(rows, seen, part))
    if "other" in verdicts:
        return "other" if sum(len(again) for _, again in twice) >= 8 else "perhaps other"
    return "same" if "same" in verdicts else "unknown"


def compare(rows, seen, part):
    """Return whether a part of the rows (0: contents, 1: labels) is the same on all ranks."""
    values = [[one[row][part] for one in seen] for row in rows]
    kinds = {mark for of in values for one in of for mark in one}
    if len(values) < 4 or len(kinds) < 2:
        return "unknown"
    differ = [of[0] != other for of in values for other in of[1:]]
    if sum(differ) > 0.4 * len(differ):
        return "other"
    return "unknown" if any(differ) else "same"


def given_twice(rank, loader):
    """Return the rows that a rank has been given twice, so that it would be seen if they change."""
    epochs = [e for e in rank.epochs if e["loader"] == loader and None not in e["batches"]]
    times = Counter(flat(flat(e["batches"] for e in epochs)))
    return [row for row, count in times.items() if count > 1]


def contents(job, report):
    """Compare what the models were called with, where rows have no numbers."""
    ranks = list(job.values())
    if len(ranks) < 2 or not all(rank.updates for rank in ranks):
        return None
    calls = [
        [f for f in r.forwards if f["what"] == "forward" and f["train"] and f["grad"]]
        for r in ranks
    ]
    shown = [[f["rows"] for f in of] for of in calls]
    steps = [one for one in zip(*shown, strict=False) if all(one)]
    if not steps:
        return report.not_seen("what the model was called with: no tensor was among it")
    report.look(f"contents of the rows in {len(steps)} training forwards of each rank")
    if any(e["trains"] and None not in e["batches"] for e in ranks[0].epochs):
        return None  # their numbers were compared
    streams = [[e for e in rank.epochs if e["iterable"] and e["trains"]] for rank in ranks]
    if all(streams):
        return judge_streams(ranks, streams, report)
    return judge_contents(shown, ranks, calls[0][0]["where"], report)


def judge_contents(shown, ranks, place, report, labels=False):
    """Compare what the ranks were given, step by step, by numbers that stand for rows."""
    steps = [one for one in zip(*shown, strict=False) if all(one)]
    sets = [set(flat(rows or [] for rows in one)) for one in shown]
    both, fewest = set.intersection(*sets), min(map(len, sets))
    strength = WRONG if share_rows(ranks) and fewest > 1 and not labels else NOT_MEANT
    other = "" if strength == WRONG else " (right, if they share each layer's work)"
    other = BY_LABELS if labels else other
    if steps and all(part == one[0] for one in steps for part in one):
        if strength == NOT_MEANT and sharded(ranks):
            return report.look(PARTS)
        text = f"all ranks trained on the same {len(both):,} rows in {len(steps)} forwards{other}"
        report.found("same rows", strength, text, place)
    elif fewest >= 4 and len(both) > 0.9 * fewest:
        text = f"all ranks trained on the same {len(both):,} rows, in another order{other}"
        report.found("all rows on each rank", strength, text, place)
    return None


def judge_streams(ranks, streams, report):
    """Compare what came of streams, by their first epoch: in the next one parts may be others."""
    place, first = streams[0][0]["where"], [of[0] for of in streams]
    ways = [[given(rank, epoch) for rank, epoch in zip(ranks, first, strict=True)]]
    if all(labels_tell_rows_apart(epoch) for epoch in first):
        ways.append([epoch["marks"] for epoch in first])  # also where rows are drawn anew
    for labels, shown in enumerate(ways):
        judge_contents(shown, ranks, place, report, labels)
        judge_overlap(shown, place, report)
    judge_workers(ranks[0], first[0], report)
    pairs = zip(streams[0], streams[0][1:], strict=False)
    for number, (old, new) in enumerate(pairs, 1):
        judge_stream_order(ranks[0], number, old, new, report)


def given(rank, epoch):
    """Return what a model got in training in an epoch: [rows of each forward]."""
    return [f["rows"] or [] for f in training(rank, epoch)]


def training(rank, epoch):
    """Return the forwards of an epoch that train."""
    calls = [f for f in rank.forwards if f["what"] == "forward" and f["epoch"] is epoch]
    return [f for f in calls if f["train"] and f["grad"]]


def labels_tell_rows_apart(epoch):
    """Return whether so many labels differ that a label stands for a row, also a repeated one."""
    labels = flat(epoch["marks"])
    return len(set(labels)) >= max(16, 0.9 * len(labels) / max(1, epoch["workers"]))


def judge_overlap(shown, place, report):
    """Say whether parts of a stream that should be apart have rows in common."""
    rows = [flat(one) for one in shown]
    once = all(len(set(one)) == len(one) >= 8 for one in rows)  # else the data has equal rows
    twice = len(flat(rows)) - len(set(flat(rows)))
    fewest = min(map(len, rows))
    if once and 0.1 * fewest < twice <= 0.9 * fewest:
        text = f"{twice:,} rows of the stream came on two ranks: parts of it overlap"
        report.found("rows twice", NOT_MEANT, f"{text}, or it has equal rows", place)


def judge_workers(rank, epoch, report):
    """Say whether each worker of a stream reads all of its rows.

    A worker may give a row twice, and a model may get a batch twice: that is somebody's wish.
    """
    end = rank.left_out.get("rows", float("inf"))  # from here on a forward may have another batch
    calls = [f for f in training(rank, epoch) if f["number"] < end]
    ways = [[(f["batch"]["worker"], f["rows"] or []) for f in calls]]
    if labels_tell_rows_apart(epoch):
        given = [e for e in rank.of("batch") if e["loader"] == epoch["loader"]]
        given = [e for e in given if e["epoch"] == epoch["epoch"]]
        ways.append([(e["worker"], e["marks"] or []) for e in given])
    for labels, pairs in enumerate(ways):
        workers = defaultdict(set)  # of each row
        for worker, rows in pairs:
            for row in rows:
                workers[row].add(worker)
        fewest = min((len(of - {None}) for of in workers.values()), default=0)
        if len(workers) > 1 and fewest == epoch["workers"] > 1:
            text = f"each row came {fewest} times on one rank, from {fewest} workers"
            text, strength = (text + BY_LABELS, NOT_MEANT) if labels else (text, WRONG)
            report.found("workers repeat rows", strength, text, epoch["where"])


def judge_stream_order(rank, number, old, new, report):
    """Compare the order of an epoch of a stream with that of the one before."""
    if old["loader"] != new["loader"]:
        return
    ways = [[flat(given(rank, epoch)) for epoch in (old, new)]]
    if all(labels_tell_rows_apart(epoch) for epoch in (old, new)):
        ways.append([flat(epoch["marks"]) for epoch in (old, new)])
    count = min(len(one) for of in ways for one in of)
    if count < 8 or not any(a[:count] == b[:count] and len(set(a)) > 3 for a, b in ways):
        return
    text = f"epoch {number} has the order of epoch {number - 1}"
    names = [name for name, value in new["told"].items() if old["told"].get(name) != value]
    if names and new["stays"]:
        why = f"{names[0]} was changed, and workers that stay have the data set that they began"
        why += " with (right, if they count by themselves, and this order is meant)"
        report.found("order repeats", NOT_MEANT, f"{text}: {why}", new["where"])
    else:
        report.found("not shuffled", TO_KNOW, f"{text}: not shuffled, or alike", new["where"])


def evaluation(job, report):
    """Each row of an evaluation once, and counts added up over the ranks."""
    ranks = list(job.values())
    used = [[e for e in rank.epochs if tests(rank, e)] for rank in ranks]
    if not any(used):
        return report.not_seen("an evaluation: no model was called in a loader without gradients")
    if len(ranks) == 1 or not all(used):
        return report.look("the evaluation: one rank does it")
    of_ranks = [of[0] for of in used]
    first, place = of_ranks[0], of_ranks[0]["where"]
    stream = any(None in one["batches"] for one in of_ranks)
    if stream:  # it has no numbers: what the model got stands for them
        dealt = [flat(seen_in(rank, one)) for rank, one in zip(ranks, of_ranks, strict=True)]
    else:
        dealt = [flat(one["batches"]) for one in of_ranks]
    report.look(f"the evaluation: {[len(one) for one in dealt]} rows by rank")
    if all(set(one) == set(dealt[0]) for one in dealt):
        return None  # each rank evaluates all rows
    known = stream or first["replicas"]
    if not known and same_data(ranks, first["loader"]) in ("other", "perhaps other"):
        return None  # each rank has rows of its own
    twice = len(flat(dealt)) - len(set(flat(dealt)))
    if twice:
        rows = "row of the evaluation was" if twice == 1 else "rows of the evaluation were"
        why = "its parts overlap, or it has equal rows" if stream else "its sampler fills up"
        report.found("rows tested twice", NOT_MEANT, f"{twice} {rows} counted twice: {why}", place)
    if any("calls" in rank.left_out for rank in ranks):
        return None
    if all(sends_nothing_after(rank, e) for rank, e in zip(ranks, of_ranks, strict=True)):
        text = "each rank evaluated its own rows, and sent no number to the others"
        report.found("counts stay at home", NOT_MEANT, text, place)
    return None


def seen_in(rank, epoch):
    """Return what models got without gradients in an epoch: [rows of each batch].

    What is called twice with a batch, or is one of two models, sees its rows once.
    """
    calls = [f for f in rank.forwards if f["what"] == "forward" and f["epoch"] is epoch]
    found = defaultdict(Counter)
    for call in calls:
        if not call["grad"]:
            found[id(call["batch"])] |= Counter(call["rows"] or [])
    return [list(rows.elements()) for rows in found.values()]


def tests(rank, epoch):
    """Return whether an epoch is one of an evaluation."""
    if epoch["trains"] or not epoch["batches"]:
        return False
    calls = [f for f in rank.forwards if f["what"] == "forward" and f["epoch"] is epoch]
    return any(not f["grad"] for f in calls)


def sends_nothing_after(rank, epoch):
    """Return whether a rank sent nothing from this epoch to the next that trains.

    What a model sends while it is called (SyncBatchNorm, for example) is no count.
    """
    later = [e["number"] for e in rank.epochs if e["trains"] and e["number"] > epoch["number"]]
    end = min(later, default=float("inf"))
    calls = [c for c in rank.calls if epoch["number"] < c["number"] < end]
    return not any((c["shape"] or "object" in c["name"]) and not c["in_model"] for c in calls)
