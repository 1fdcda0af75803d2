"""Whether the ranks train one model: gradients, updates, parameters, settings, buffers, modes."""

import statistics
from collections import defaultdict

from lockstep.watch.findings import NOT_MEANT, TO_KNOW, WRONG, odd, replicas, sharded, some

# How far a gradient may be from the mean of the ranks' own, relative to their lengths.
CLOSE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
SENT_BY_A_HOOK = 0.02  # in bfloat16, for example


def side_by_side(ranks):
    """Return the ranks' updates, update by update."""
    return list(zip(*(rank.updates for rank in ranks), strict=False))


def updates(job, report):
    """Compare how many updates the ranks have made."""
    ranks = list(job.values())
    made = [rank.count() for rank in ranks]
    if not any(made):
        return report.not_seen("updates: no optimizer of torch.optim made one")
    seen, most = min(len(rank.updates) for rank in ranks), max(made)
    report.look(
        f"{min(made)} updates of each rank"
        if seen == min(made)
        else f"the first {seen:,} of {most:,} updates"
    )
    if joins(ranks):
        report.not_seen("each update: inside of model.join() ranks may make unequal numbers")
    elif skipped_alone(ranks, report):
        report.not_seen("gradients and parameters side by side: a rank has skipped an update")
    elif len(set(made)) > 1 and all(rank.ended for rank in ranks):
        place = next(rank.updates[-1]["where"] for rank in ranks if rank.updates)
        text = f"the ranks made {', '.join(map(str, made))} updates"
        report.found("unequal updates", NOT_MEANT, text, place)
    return None


def skips(rank):
    """Return the numbers of the updates before which a rank has skipped one.

    Then it has called backward() twice as often as usual, or more.
    """
    counts = defaultdict(list)
    for update in rank.updates:
        counts[update["optimizer"]].append(len(update["backwards"]))
    usual = {optimizer: statistics.mode(of) for optimizer, of in counts.items()}
    found = []
    for number, update in enumerate(rank.updates, 1):
        times, rest = divmod(len(update["backwards"]), max(1, usual[update["optimizer"]]))
        found += [number] if times > 1 and not rest else []
    return found


def skipped_alone(ranks, report):
    """Say whether some ranks, and not all, have skipped an update; return whether it is so."""
    theirs = [skips(rank) for rank in ranks]
    alone = {n for of in theirs for n in of if not all(n in them for them in theirs)}
    first = min((n for n in alone if not are_equal_after(n, ranks)), default=0)
    if first:
        who = [number for number, of in enumerate(theirs) if first in of]
        text = f"before update {first} an update was skipped, and not by all ranks: from then on"
        text += " they train different models"
        strength = WRONG if replicas(ranks) else NOT_MEANT
        if strength == NOT_MEANT:
            text += " (or does a rank call backward() more often for some updates?)"
        place = ranks[who[0]].updates[first - 1]["where"]
        report.found("skipped alone", strength, text, place, who)
    return bool(first)


def are_equal_after(number, ranks):
    """Return whether all ranks have the same parameters after an update: none has skipped one."""
    one = [rank.updates[number - 1] for rank in ranks if len(rank.updates) >= number]
    names = [rank.names(u) for rank, u in zip(ranks, one, strict=False)]
    same = all(of == names[0] for of in names) and len(one) == len(ranks)
    return same and not sharded(ranks) and first_difference(one, "after", names[0], ranks) is None


def joins(ranks):
    """Return whether the ranks may have unequal numbers of batches, by model.join()."""
    return any(rank.of("join") for rank in ranks)


# --- Gradients ---


def gradients(job, report):
    """Say at which update gradients are first not the mean of the ranks' own, and why."""
    ranks = list(job.values())
    for number, rank in enumerate(ranks):
        for update in rank.updates[1:2]:
            if update["carried"]:
                text = "update 2 still has the gradients of update 1 (or is this meant?)"
                report.found("gradients pile up", NOT_MEANT, text, update["where"], [number])
                return  # then gradients are not those of one update
    if replaced := next((e for rank in ranks for e in rank.of("replaced")), None):
        text = f"{some(replaced['names'])} came into the model after it was wrapped,"
        text += " and DDP does not know it: its gradient stays on each rank"
        report.found("replaced after wrapping", WRONG, text, replaced["where"])
        return
    alone = any(one.kind == "skipped alone" for one in report.findings)
    if len(ranks) == 1 or sharded(ranks) or joins(ranks) or alone:
        return
    for number, one in enumerate(side_by_side(ranks), 1):
        names = ranks[0].names(one[0])
        if any(rank.names(u) != names for rank, u in zip(ranks, one, strict=True)):
            return report.not_seen("gradients of the ranks: their parameters have other names")
        if judge_gradients(one, number, names, ranks, report):
            return
    if any(rank.updates for rank in ranks):
        report.look("gradients: each is the mean of the ranks' own")


def judge_gradients(one, number, names, ranks, report):
    """Judge one update of all ranks; return whether something was found."""
    away, ratios = from_the_mean(one, ranks)
    away = [n for n in away if names[n] not in ignored(ranks)]
    differ = first_difference(one, "grads", names, ranks)
    if differ is not None:
        return judge_differing(one, number, names[differ], away, ranks, report)
    if not away:
        return False
    place = one[0]["where"]
    even = is_even(ratios)
    _, unclipped = from_the_mean(one, ranks, "unclipped")
    if any(even_at(r, len(ranks)) for r in (ratios, unclipped)):
        text = f"in update {number} gradients are the sum over ranks, {len(ranks)} times their mean"
        text += " (right, if each loss is divided by the rows of all ranks)"
        report.found("sum of gradients", NOT_MEANT, text, place)
        return True
    if even or (ranks[0].hooked and not ratios):
        return False  # clipped after they were averaged, or scaled
    clipped = next((line for u in one for line in u["clipped"]), None)
    if clipped and all(clipped_alone(u) for u in one):
        text = f"in update {number} gradients are out of proportion to the mean of the ranks' own:"
        text += " clipped on each rank, before they were averaged?"
        report.found("clipped too early", NOT_MEANT, text, clipped)
        return True
    text = f"in update {number} the gradient of {names[away[0]]} is not the mean of the ranks' own"
    report.found("not the mean", TO_KNOW, text, place)
    return True


def clipped_alone(update):
    """Return whether gradients were still those of this rank alone when they were clipped."""
    pairs = zip(update["unclipped"], update["own"], update["own_norms"], strict=True)
    return all(u is None or abs(u - own) <= 1e-3 * length for u, own, length in pairs)


def judge_differing(one, number, name, away, ranks, report):
    """Say why the ranks have different gradients in an update."""
    models = [w for rank in ranks for w in rank.wrapped.values()]
    past = next((line for u in one for line in u["past"]), None)
    silent = next((b[0] for u in one for b in u["backwards"][-1:] if b[1]), None)
    line = next((b[0] for u in one for b in u["backwards"]), None) or one[0]["where"]
    if past and models:
        text = f"in update {number} the model was called past DDP, so nothing was averaged"
        report.found("past DDP", WRONG, text, past)
    elif silent and models:
        text = f"before update {number} the last backward was under no_sync(), so it sent nothing"
        report.found("no_sync", WRONG, text, silent)
    elif not models:
        sent = any(c["shape"] for rank in ranks for c in rank.calls)
        text = f"in update {number} each rank has a gradient of its own, first {name}"
        why = ": the ranks train apart" if not sent else " (right, if ranks hold parts of a model)"
        report.found("no exchange", NOT_MEANT if sent else WRONG, text + why, line)
    else:
        text = f"in update {number} gradients differ between ranks, first {name}"
        report.found("gradients differ", WRONG, text, one[0]["where"])
    return True


def is_even(ratios):
    """Return whether all gradients are the same multiple of the mean."""
    return bool(ratios) and max(ratios) - min(ratios) < 0.03 * abs(max(ratios))


def even_at(ratios, times):
    """Return whether all gradients are so many times the mean."""
    return is_even(ratios) and abs(sum(ratios) / len(ratios) - times) < 0.05


def from_the_mean(one, ranks, what="means"):
    """Return (the gradients that are not the mean of the ranks' own, their ratios to it)."""
    away, ratios = [], []
    kinds = ranks[0].optimizers[one[0]["optimizer"]]["kinds"]
    for n, kind in enumerate(kinds):
        means = [u[what][n] for u in one]
        if None in means:
            continue
        right = sum(u["own"][n] for u in one) / len(one)
        scale = sum(u["own_norms"][n] for u in one) / len(one) + 1e-30
        close = max(CLOSE.get(kind, 0.05), SENT_BY_A_HOOK * ranks[0].hooked) * scale
        if any(abs(mean - right) > close for mean in means):
            away.append(n)
        if abs(right) > 20 * close:
            ratios.append(means[0] / right)
    return away, ratios


def ignored(ranks):
    """Return the names of parameters that DDP was told to leave alone."""
    return {name for rank in ranks for w in rank.wrapped.values() for name in w["ignored"]}


def first_difference(one, what, names, ranks):
    """Return the number of the first parameter in which the ranks differ, or None."""
    columns = enumerate(zip(*(update[what] for update in one), strict=False))
    apart = [n for n, values in columns if len(set(values)) > 1]
    return next((n for n in apart if names[n] not in ignored(ranks)), None)


# --- Parameters and settings ---


def replicas_start(ranks, report):
    """Say whether the replicas are equal after wrapping."""
    for number, wrapped in ranks[0].wrapped.items():
        theirs = [rank.wrapped.get(number, wrapped) for rank in ranks]
        if any(one["sums"] != wrapped["sums"] for one in theirs):
            why = "" if wrapped["init_sync"] else ": init_sync=False"
            text = f"the replicas differ after wrapping{why}"
            report.found("replicas start apart", WRONG, text, wrapped["where"])


def replicas_of(one, ranks):
    """Return whether the parameters of an update should be equal on all ranks."""
    names = [rank.names(u) for rank, u in zip(ranks, one, strict=True)]
    return all(of == names[0] for of in names) and replicas(ranks)


def judge_settings(ranks, report):
    """Compare learning rate, weight decay and the like, as far as all ranks have as many groups."""
    for number, one in enumerate([] if joins(ranks) else side_by_side(ranks), 1):
        if len({len(u["settings"]) for u in one}) > 1:
            return
        first, other = one[0], next((u for u in one if u["settings"] != one[0]["settings"]), None)
        if other:
            groups = zip(first["settings"], other["settings"], strict=True)
            key = next((k for g, h in groups for k in g if g[k] != h.get(k)), "groups")
            values = ", ".join(str(u["settings"][0].get(key)) for u in one)
            made = ranks[0].optimizers[one[0]["optimizer"]]["where"]
            text = f"at update {number} {key} is {values} on the ranks"
            if number > 1:
                text += ", and was alike before: does a scheduler follow each rank's own loss?"
            others = odd([u["settings"] for u in one])
            report.found("settings differ", WRONG, text, made, others)
            return
    if any(rank.updates for rank in ranks):
        report.look("settings of the optimizers: the same on all ranks")


def judge_replicas(one, number, ranks, report):
    """Judge parameters at one update; return whether something was found."""
    names, place = ranks[0].names(one[0]), one[0]["where"]
    for moment, when in (
        ("before", f"before update {number}"),
        ("after", f"after update {number}"),
    ):
        differ = first_difference(one, moment, names, ranks)
        if differ is not None:
            who = odd([u[moment][differ] for u in one])
            text = f"parameters differ {when}, first {names[differ]}"
            if moment == "before" and number == 1 and not ranks[0].wrapped:
                report.found("replicas start apart", WRONG, text, place, who)
                return True
            if moment == "before":
                wrapping = "wrapping (has one rank loaded a checkpoint?)"
                text += (
                    f", and were equal after {f'update {number - 1}' if number > 1 else wrapping}"
                )
            if moment == "after" and first_difference(one, "grads", names, ranks) is None:
                text += ", from equal ones and with equal gradients: are its averages (momentum)"
                text += " other ones, from a checkpoint that not all ranks have loaded?"
                report.found("optimizer states differ", WRONG, text, place, who)
                return True
            report.found("replicas differ", WRONG, text, place, who)
            return True
    return False


def judge_end(ranks, report):
    """Compare the parameters at the end, where they were equal after the last update."""
    if len({rank.count() for rank in ranks}) > 1 and not joins(ranks):
        return
    for number, state in ranks[0].states.items():
        sums = [rank.states.get(number, state)["sums"] for rank in ranks]
        if state["trained"] and any(one != sums[0] for one in sums):
            text = "parameters differ at the end"
            seen = f"update {len(ranks[0].updates)}, the last one that was looked at"
            last = seen if "updates" in ranks[0].left_out else "the last update"
            text += "" if joins(ranks) else f", and were equal after {last}"
            report.found("replicas differ", WRONG, text, ranks[0].updates[-1]["where"])


def replicas_differ(job, report):
    """Compare parameters and settings at each update, and at the end."""
    ranks = list(job.values())
    if len(ranks) == 1 or sharded(ranks):
        return
    replicas_start(ranks, report)
    judge_settings(ranks, report)
    causes = {
        "settings differ",
        "skipped alone",
        "replaced after wrapping",
        "no exchange",
        "past DDP",
        "no_sync",
        "gradients differ",
        "replicas start apart",
    }
    if causes & {one.kind for one in report.findings}:
        return report.not_seen("parameters after each update: they differ after what was found")
    for number, one in enumerate([] if joins(ranks) else side_by_side(ranks), 1):
        if not replicas_of(one, ranks):
            return report.not_seen("parameters: the ranks' optimizers have different ones")
        if judge_replicas(one, number, ranks, report):
            return None
    if replicas(ranks):
        judge_end(ranks, report)
        report.look("parameters: equal before and after each update")
    return None


# --- What is trained ---


def optimizers(job, report):
    """Parameters that no optimizer has, that never get a gradient, that never change."""
    rank = next(iter(job.values()))
    if not rank.updates:
        return
    names = {name for o in rank.optimizers.values() for name in o["names"]}
    for number, state in rank.states.items():
        if state["unowned"] and names & set(rank.models[number]["names"]):
            made = next(iter(rank.optimizers.values()))["where"]
            text = f"{some(state['unowned'])} can be trained, and no optimizer has it"
            report.found("in no optimizer", NOT_MEANT, text, made)
    for number, optimizer in rank.optimizers.items():
        steps = [[u for u in r.updates if u["optimizer"] == number] for r in job.values()]
        if all(steps):
            judge_optimizer(optimizer, steps, len(rank.optimizers) > 1, report)


def judge_optimizer(optimizer, steps, others, report):
    """Judge what one optimizer has trained in `steps`, its updates on each rank."""
    updates = [u for of in steps for u in of]
    wanted = [n for n, wants in enumerate(optimizer["wanted"]) if wants]
    never = [n for n in wanted if not any(has_gradient(u, n) for u in updates)]
    place, names = updates[0]["where"], optimizer["names"]
    if never and len(never) == len(wanted):
        text = f"no parameter got a gradient other than 0 in {len(steps[0])} updates"
        if others:
            text = text.replace("parameter", "parameter of this optimizer") + " (or not yet?)"
        strength = NOT_MEANT if others else WRONG
        report.found("no gradient at all", strength, text, place)
    elif never:
        text = f"{some([names[n] for n in never])} got no gradient in {len(steps[0])} updates"
        report.found("never a gradient", NOT_MEANT, text, place)
    still = [n for n in wanted if is_felt(updates, n) and stays(steps[0], n)]
    if still:
        text = f"{some([names[n] for n in still])} got gradients in {len(steps[0])} updates, and"
        text += " did not change: is the learning rate 0, or too small for its type?"
        report.found("never changes", NOT_MEANT, text, place)


def has_gradient(update, n):
    """Return whether parameter n had a gradient that is not zero."""
    return n < len(update["some"]) and update["some"][n]


def is_felt(updates, n):
    """Return whether parameter n had more than rounding, which a bias before BatchNorm has."""
    sizes = [[abs(projection or 0) for projection in update["means"]] for update in updates]
    own = max((of[n] for of in sizes if n < len(of)), default=0)
    return own > 1e-5 * max(map(max, sizes))


def stays(updates, n):
    """Return whether parameter n has the same bits before and after all updates."""
    values = {u[when][n] for u in updates for when in ("before", "after") if n < len(u[when])}
    return len(values) == 1


# --- Modes and buffers ---


def modes(job, report):
    """train() and eval(), where a layer behaves differently."""
    rank = next(iter(job.values()))
    touchy = {
        number for number, m in rank.models.items() if m["norms"] or m["synced"] or m["dropout"]
    }
    if not touchy:
        return
    trained = False
    for number, update in enumerate(rank.updates, 1):
        if update["mode"] is False and trained:
            text = f"from update {number} on the model trains in eval mode, and did not before"
            report.found("trains in eval mode", NOT_MEANT, text, update["where"])
            break
        trained |= bool(update["mode"])
    for call in rank.forwards:
        loud = call["what"] == "forward" and call["train"] and not call["grad"]
        if loud and (call["model"] in touchy or call["model"] is None):
            text = "a model without gradients is in train mode: BatchNorm and dropout act as there"
            report.found("tests in train mode", NOT_MEANT, text, call["where"])
            break


def buffers(job, report):
    """Compare the buffers at the end."""
    ranks = list(job.values())
    if not all(rank.updates for rank in ranks) or len(ranks) == 1:
        return
    for number, model in ranks[0].models.items():
        states = [rank.states.get(number) for rank in ranks]
        if None in states:
            report.not_seen(f"the buffers of {model['type']} at the end")
            continue
        theirs = [state["buffers"] for state in states]
        names = [n for n in theirs[0] if len({of.get(n) for of in theirs}) > 1]
        wrapped = ranks[0].wrapped.get(number, {})
        if names and model["norms"]:
            text = (
                f"BatchNorm takes the mean of each rank's own rows; '{names[0]}' differs at the end"
            )
            sent = wrapped.get("sends_buffers", False)
            why = "" if sent else ", and nobody sends it"
            place = wrapped.get("where")
            report.found("buffers differ", TO_KNOW if sent else NOT_MEANT, text + why, place)
        elif names:
            which = f"the buffer {names[0]} differs"
            if len(names) > 1:
                which = f"the buffers {some(names)} differ"
            text = f"{which} between ranks at the end"
            if wrapped.get("sends_buffers"):
                text += ": DDP sends rank 0's before each forward, and what the others made is lost"
            else:
                text += ", and nobody sends them (right, if each rank shall have its own)"
            report.found("buffers of one's own", NOT_MEANT, text, wrapped.get("where"))
