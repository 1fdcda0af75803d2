"""Lesson 09: what BatchNorm sees of a batch in parts, and a BatchNorm that sees all of it."""

import argparse
import contextlib
import copy
import json
import sys
import warnings

import cloudpickle
import lesson_09_batch_norm as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import run_lesson
from nbtools import run
from nbtools.record import Wire
from solutions.lesson_09 import check, solution
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# `run` sends the functions of this file to the ranks, so that no rank imports this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MOMENTUM = 0.1


def config(nproc, **changes):
    usual = {"steps": 20, "batch_size": 30, "seed": 0}
    return argparse.Namespace(nproc=nproc, **{**usual, **changes})


def compare_on_a_rank(rank, world_size, *options):
    torch.set_num_threads(1)
    return lesson.compare(config(world_size, **dict(options)))


@pytest.fixture(scope="module")
def measured():
    """Return what the lesson's comparison measures with 1 to 4 ranks, and with 8: {nproc: facts}.

    With 8 ranks and 30 rows the first rank has no row at all, where it is synchronised.
    """
    facts = {nproc: run(compare_on_a_rank, nproc)[0] for nproc in (1, 2, 3, 4)}
    return facts | {8: run(compare_on_a_rank, 8, ("steps", 3))[0]}


def batch(size=30, seed=0):
    rows, targets, _ = lesson.make_toy(seed)
    return rows[:size], targets[:size]


def largest(one, other):
    return (one - other).abs().max().item()


# --- Plain BatchNorm: each part on its own, and the master's running statistics ---


def first_layer(rows, seed=0):
    """Return what BatchNorm is given in step 1: the first layer's outputs (n, 8)."""
    return lesson.make_model(nn.BatchNorm1d, seed)[0](rows).detach()


@pytest.mark.claim("A7")
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_each_part_is_normalised_on_its_own(measured, nproc):
    used = measured[nproc]["used"]
    share = 30 // nproc
    parts = first_layer(batch(share * nproc)[0]).split(share)
    means = [part.mean(0)[0].item() for part in parts]
    assert max(means) - min(means) > 0.01  # there is a difference to be seen
    for way in ("DataParallel", "DDP", "DDP, buffers not sent"):
        assert used[way] == pytest.approx(means, abs=1e-10)
    whole = torch.cat(parts).mean(0)[0].item()
    assert used["one process"] == pytest.approx([whole], abs=1e-10)
    assert used["synchronised"] == pytest.approx([whole] * nproc, abs=1e-10)
    assert measured[nproc]["plain_diff"] > 0.01


@pytest.mark.claim("A7")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 8])
def test_synchronised_acts_like_the_whole_batch(measured, nproc):
    """Outputs, gradients, parameters and running statistics after 20 steps, on uneven parts."""
    facts = measured[nproc]
    assert facts["sync_diff"] < 1e-10
    assert facts["ddp_diff"] < 1e-10  # DDP's replicas do what DataParallel's do, in step 1
    for name in ("kept", "kept_variance"):  # and rank 0 keeps what the master keeps, to the end
        assert facts[name]["DDP"][0] == pytest.approx(facts[name]["DataParallel"][0], abs=1e-10)
    assert (facts["plain_diff"] > 0.01) == (nproc > 1)
    parts = {1: [30], 2: [10, 20], 3: [5, 10, 15], 4: [2, 6, 8, 12], 8: [0, 2, 2, 2, 4, 4, 4, 6]}
    assert facts["parts"] == parts[nproc]
    assert facts["param_change"] > 0.01


@pytest.mark.claim("A7")
@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("statistic", ["kept", "kept_variance"])
def test_running_statistics_kept_are_the_masters(measured, nproc, statistic):
    kept = measured[nproc][statistic]
    (master,) = kept["DataParallel"]
    assert abs(master - kept["one process"][0]) > 1e-3
    for way in ("DDP", "DDP, buffers not sent"):
        assert kept[way][0] == pytest.approx(master, abs=1e-10)  # rank 0 has the master's
        assert len(set(kept[way])) == nproc  # every rank has others after the last forward
    spread = {way: max(means) - min(means) for way, means in kept.items()}
    assert spread["DDP, buffers not sent"] > 3 * spread["DDP"] > 0
    assert kept["synchronised"] == pytest.approx(kept["one process"] * nproc, abs=1e-10)


@pytest.mark.claim("A7")
def test_data_parallel_keeps_the_masters_statistics_and_adds_all_gradients():
    """Against three models of their own, of which only the first is kept."""
    rows, targets = batch(30)
    model = lesson.make_model(nn.BatchNorm1d, 0)
    theirs, ours, *lost = (copy.deepcopy(model) for _ in range(4))
    pairs = zip([theirs, *lost], rows.chunk(3), strict=True)
    nn.functional.mse_loss(torch.cat([one(part) for one, part in pairs]), targets).backward()
    outputs = lesson.data_parallel(ours, rows, 3)
    nn.functional.mse_loss(outputs, targets).backward()
    models = zip(*(one.parameters() for one in (ours, theirs, *lost)), strict=True)
    for mine, *parts in models:
        assert largest(mine.grad, sum(part.grad for part in parts)) < 1e-12
    for one, other in zip(theirs.buffers(), ours.buffers(), strict=True):
        assert torch.equal(one, other)
    master = model[0](rows[:10]).detach()
    assert largest(ours[1].running_mean, MOMENTUM * master.mean(0)) < 1e-12
    assert largest(ours[1].running_var, 1 - MOMENTUM + MOMENTUM * master.var(0)) < 1e-12
    assert ours[1].num_batches_tracked == 1


def statistics_under_ddp(rank, world_size, sync, name="forward_sync_buffers"):
    """Return running means after wrapping, after each of 3 steps, and after an evaluation."""
    rows, _ = batch(12 * world_size)
    model = lesson.make_model(nn.BatchNorm1d, 0)
    model[1].running_mean.fill_(float(rank))  # the ranks begin with different statistics
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model, **{name: sync})
    seen = [model[1].running_mean.clone()]
    for step in range(3):
        part = rows[12 * rank + 4 * step :][:4]
        ddp(part).sum().backward()  # no optimizer: the first layer stays as it is
        seen.append(model[1].running_mean.clone())
    with torch.no_grad():
        ddp.eval()(rows)
    seen.append(model[1].running_mean.clone())
    inputs = [model[0](rows[12 * rank + 4 * step :][:4]).mean(0).detach() for step in range(3)]
    texts = [str(warning.message) for warning in caught]
    return torch.stack(seen), torch.stack(inputs), texts


@pytest.mark.claim("A7")
@pytest.mark.parametrize("sync", [True, False])
def test_buffers_sent_before_each_forward_differ_again_after_it(sync):
    """Before each forward here, ranks take rank 0's; in training they then add their own."""
    answers = run(statistics_under_ddp, 3, sync)
    of_rank_0 = answers[0][0]
    for seen, inputs, texts in answers:
        assert texts == []
        assert largest(seen[0], of_rank_0[0]) == 0  # wrapping sends rank 0's in both cases
        for step in range(3):
            before = of_rank_0[step] if sync else seen[step]
            wanted = (1 - MOMENTUM) * before + MOMENTUM * inputs[step]
            assert largest(seen[step + 1], wanted) < 1e-12
        assert torch.equal(seen[4], of_rank_0[3] if sync else seen[3])
    assert largest(answers[1][0][3], of_rank_0[3]) > 1e-3


def buffers_sent(rank, world_size):
    """Return whether buffers were sent before each of some forwards, all in training mode."""
    ddp = DistributedDataParallel(lesson.make_model(nn.BatchNorm1d, 0))
    sent = []
    for kind in ("usual", "no_grad", "no_grad", "usual", "usual", "no_sync", "usual"):
        context = {"no_grad": torch.no_grad, "no_sync": ddp.no_sync}.get(
            kind, contextlib.nullcontext
        )
        with Wire() as wire, context():
            outputs = ddp(batch(8)[0][4 * rank :][:4])
        if kind != "no_grad":
            outputs.sum().backward()
        sent.append(
            any((call.name, call.nbytes) == ("broadcast", 2 * 8 * 8) for call in wire.calls)
        )
    return sent


@pytest.mark.claim("A7")
def test_after_a_forward_without_gradients_the_next_one_sends_no_buffers():
    assert run(buffers_sent, 2) == [[True, True, False, False, True, True, False]] * 2


def test_the_old_name_broadcast_buffers_warns_and_does_not_send_when_wrapping():
    answers = run(statistics_under_ddp, 2, False, "broadcast_buffers")
    for rank, (seen, _, texts) in enumerate(answers):
        assert torch.equal(seen[0], torch.full((8,), float(rank), dtype=torch.float64))
        assert any("forward_sync_buffers" in text for text in texts)


def one_row(rank, world_size):
    rows, _ = batch(world_size)
    part = rows[rank : rank + 1]
    answers = []
    for norm in (nn.BatchNorm1d, lesson.SynchronisedBatchNorm):
        try:
            answers.append(lesson.make_model(norm, 0)(part).detach())
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_one_row_per_rank_is_refused_by_plain_and_not_by_synchronised():
    answers = run(one_row, 3)
    wanted = lesson.make_model(nn.BatchNorm1d, 0)(batch(3)[0]).detach()
    for rank, (plain, synchronised) in enumerate(answers):
        assert plain.startswith("Expected more than 1 value per channel when training")
        assert largest(synchronised, wanted[rank : rank + 1]) < 1e-10


# --- Synchronised BatchNorm by hand ---


def parts_of(sizes, rank):
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def forward_and_backward(rank, world_size, sizes, dtype=torch.float64):
    """Return outputs, gradients and buffers of the layer alone, without DDP; then evaluate."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(5)
    rows = 3 + 2 * torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    weights = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    norm = (nn.BatchNorm1d if world_size == 1 else lesson.SynchronisedBatchNorm)(6, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1, 7))
        norm.bias.copy_(torch.arange(6))
    part = parts_of(sizes, rank) if world_size > 1 else slice(None)
    inputs = rows[part].to(dtype).requires_grad_()
    for _ in range(2):  # twice: the running statistics are more than the first batch's
        outputs = norm(inputs)
    (outputs.sin() * weights[part]).sum().backward()
    for parameter in norm.parameters() if world_size > 1 else ():
        dist.all_reduce(parameter.grad)  # what DDP would do, without its division
    buffers = torch.cat([buffer.double().flatten() for buffer in norm.buffers()])
    gradients = [inputs.grad, norm.weight.grad, norm.bias.grad]
    evaluated = norm.eval()(rows.to(dtype)).detach()
    return outputs.detach(), *gradients, buffers, evaluated


SIZES = [(7, 7), (7, 3), (1, 9), (0, 8), (8, 0), (1, 1), (4, 1, 2), (0, 0, 5), (1, 2, 3, 4)]


@pytest.mark.claim("A7")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layer_equals_the_whole_batch_in_float64(sizes):
    """Forward, backward and running statistics, for parts of any size, without DDP."""
    whole = forward_and_backward(0, 1, sizes)
    answers = run(forward_and_backward, len(sizes), sizes)
    for rank, (outputs, inputs, weight, bias, buffers, evaluated) in enumerate(answers):
        part = parts_of(sizes, rank)
        assert outputs.shape == whole[0][part].shape
        assert torch.allclose(outputs, whole[0][part], rtol=0, atol=1e-10)
        assert torch.allclose(inputs, whole[1][part], rtol=0, atol=1e-10)
        for ours, theirs in ((weight, whole[2]), (bias, whole[3]), (buffers, whole[4])):
            assert largest(ours, theirs) < 1e-10
        assert largest(evaluated, whole[5]) < 1e-10
        assert buffers[-1] == 2  # num_batches_tracked


def bad_counts(rank, world_size, sizes):
    try:
        lesson.batch_statistics(torch.ones(sizes[rank], 4))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (0, 1)])
def test_less_than_two_rows_are_refused_on_every_rank(sizes):
    message = f"Expected more than 1 row on all ranks together, got {sum(sizes)}"
    assert run(bad_counts, 2, sizes) == [message] * 2


def check_gradient(rank, world_size):
    """Return gradients of two functions of the sum: by our function, by the library's, by hand."""
    from torch.distributed import _functional_collectives as today
    from torch.distributed.nn import functional as deprecated

    def librarys(tensor):
        return today.all_reduce(tensor, "sum", dist.group.WORLD)

    results = []
    for add_up in (lesson.SumOverRanks.apply, librarys, deprecated.all_reduce):
        x = torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + 1)
        kept = x.clone()
        x.requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = add_up(x)
        (total.square() * (rank + 1)).sum().backward()
        assert torch.equal(x.detach(), kept)  # the input is left alone
        results.append((total.detach(), x.grad))
    return results, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_sum_over_ranks_has_the_gradient_of_all_sums(nproc):
    ranks = range(1, nproc + 1)
    total = torch.tensor([1.0, 2.0], dtype=torch.float64) * sum(ranks)
    gradient = 2 * total * sum(ranks)  # from each rank's loss, rank + 1 times the square
    for sums, warned in run(check_gradient, nproc):
        assert len(sums) == 3
        for ours, our_gradient in sums:
            assert torch.equal(ours, total) and torch.equal(our_gradient, gradient)
        assert "deprecated" in warned[0] and "_functional_collectives" in warned[0]


def shared_gradient(rank, world_size):
    """Return the gradient of a second tensor, which autograd hands on in the same memory."""
    other = torch.ones(2, requires_grad=True)
    product = other * 1  # made before the sum, so its backward comes after that of the sum
    total = lesson.SumOverRanks.apply(torch.ones(2, requires_grad=True))
    ((total + product) * torch.full((2,), rank + 1.0)).sum().backward()
    return other.grad.tolist()


def test_sum_over_ranks_leaves_the_gradient_of_others_alone():
    assert run(shared_gradient, 2) == [[1.0, 1.0], [2.0, 2.0]]


def variance_of_shifted(rank, world_size, shift):
    """Return largest relative error of the variance in float32: two passes, and one."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(64, 8, generator=generator, dtype=torch.float64) + shift).float()
    wanted = rows.double().var(0, correction=0)
    part = rows[16:] if rank else rows[:16]
    _, two_passes, _ = lesson.batch_statistics(part)
    sums = lesson.SumOverRanks.apply(torch.cat([part.sum(0), part.square().sum(0)])) / 64
    one_pass = sums[8:] - sums[:8] ** 2
    return [((v.double() - wanted) / wanted).abs().max().item() for v in (two_passes, one_pass)]


def test_two_passes_keep_the_digits_that_one_pass_loses():
    small, large = run(variance_of_shifted, 2, 0.0)[0], run(variance_of_shifted, 2, 1000.0)[0]
    assert max(small) < 1e-5
    assert large[0] < 1e-4 < 1e-3 < large[1]


def train_with_share(rank, world_size, sizes, scaled):
    """Return the gradient of DDP on uneven parts, with the loss scaled or each part's mean."""
    rows, targets = batch(sum(sizes))
    part = parts_of(sizes, rank)
    model = lesson.make_model(lesson.SynchronisedBatchNorm, 0)
    ddp = DistributedDataParallel(model)
    if scaled:
        return lesson.train(model, ddp, [(rows, targets)], part, world_size)["gradient"]
    nn.functional.mse_loss(ddp(rows[part]), targets[part]).backward()
    return lesson.flat(parameter.grad for parameter in model.parameters())


@pytest.mark.claim("A7")
def test_uneven_parts_need_a_scaled_loss():
    """DDP's mean of the parts' means is another gradient, though the statistics are right."""
    rows, targets = batch(10)
    model = lesson.make_model(nn.BatchNorm1d, 0)
    whole = lesson.train(model, model, [(rows, targets)])["gradient"]
    for gradient in run(train_with_share, 2, (7, 3), True):
        assert largest(gradient, whole) < 1e-10
    for gradient in run(train_with_share, 2, (7, 3), False):
        assert largest(gradient, whole) > 0.01


def library_on_cpu(rank, world_size):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(lesson.make_model(nn.BatchNorm1d, 0))
    try:
        model(batch(4)[0])
    except ValueError as error:
        return str(error), model.eval()(batch(4)[0]).shape


@pytest.mark.parametrize("nproc", [1, 2])
def test_library_refuses_cpus_as_soon_as_there_is_a_group(nproc):
    refusal = "SyncBatchNorm expected input tensor to be on GPU or XPU or privateuseone"
    assert run(library_on_cpu, nproc) == [(refusal, (4, 2))] * nproc
    assert not dist.is_initialized()  # here there is no group: it is plain BatchNorm
    assert nn.SyncBatchNorm(5)(torch.randn(4, 5)).shape == (4, 5)


@pytest.mark.gpu
@pytest.mark.claim("A7")
def test_library_equals_ours_on_gpus():
    nproc = min(2, torch.cuda.device_count())
    finished = run_lesson(9, "--nproc", nproc, "--json")
    assert finished.returncode == 0, finished.stderr
    assert finished.json["device"] == "cuda" and "nn.SyncBatchNorm" in finished.json["used"]


def listen(rank, world_size, norm, sync):
    model = lesson.make_model(norm, 0)
    ddp = DistributedDataParallel(model, forward_sync_buffers=sync)
    rows, targets = batch(5)
    with Wire() as forward:
        loss = nn.functional.mse_loss(ddp(rows), targets)
    with Wire() as backward:
        loss.backward()
    return [[(call.name, call.nbytes) for call in wire.calls] for wire in (forward, backward)]


def test_bytes_of_a_step_with_and_without():
    """8 channels, 82 parameters, 8 bytes per number."""
    gradients = [("allreduce", 82 * 8)]
    buffers = [("broadcast", 2 * 8 * 8), ("broadcast", 8)]  # mean and variance; a counter
    sums = [("allreduce", 9 * 8), ("allreduce", 8 * 8)]
    for forward, backward in run(listen, 2, nn.BatchNorm1d, True):
        assert (sorted(forward), backward) == (sorted(buffers), gradients)
    for forward, backward in run(listen, 2, nn.BatchNorm1d, False):
        assert (forward, backward) == ([], gradients)
    for forward, backward in run(listen, 2, lesson.SynchronisedBatchNorm, False):
        assert forward == sums
        assert sorted(backward) == sorted(gradients + sums)


NAMES = ("gradient", "parameters", "kept")


def test_difference_sees_every_part_of_every_record():
    def record(rows):
        zeros = {name: torch.zeros(4) for name in NAMES}
        return {**zeros, "outputs": torch.zeros(rows, 2)}

    one, records = record(6), [record(2), record(4)]
    assert lesson.difference(records, one) == 0.0
    for rank in (0, 1):
        for name in one:
            for value in (0.5, -0.5, float("nan")):
                changed = copy.deepcopy(records)
                changed[rank][name].view(-1)[-1] = value
                assert str(lesson.difference(changed, one)) == str(abs(value)), (rank, name)
                ignored = name in ("parameters", "kept")
                assert (lesson.difference(changed, one, ["gradient"]) == 0.0) == ignored


def watch_training(rank, world_size, seed):
    """Return the batches and the first weights of each training that the comparison makes."""
    train, seen = lesson.train, []

    def watched(model, forward, batches, *part):
        seen.append((batches, lesson.flat(model.parameters())))
        return train(model, forward, batches, *part)

    lesson.train = watched
    lesson.compare(config(world_size, steps=5, seed=seed))
    return seen


@pytest.mark.parametrize("seed", [0, 3])
def test_all_ways_have_the_same_weights_and_batches(seed):
    rows, targets, _ = lesson.make_toy(seed)
    for seen in run(watch_training, 2, seed):
        assert len(seen) == 5
        for batches, weights in seen:
            model = lesson.make_model(nn.BatchNorm1d, seed)
            assert torch.equal(weights, lesson.flat(model.parameters()))
            assert len(batches) == 5  # three full batches, then the first two again
            for number, (batch_rows, batch_targets) in enumerate(batches):
                part = slice(30 * (number % 3), 30 * (number % 3) + 30)
                assert torch.equal(batch_rows, rows[part])
                assert torch.equal(batch_targets, targets[part])


def test_mean_used_is_solved_from_the_outputs():
    rows = torch.randn(9, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mean = torch.linspace(-3, 3, 8, dtype=torch.float64)
    assert largest(lesson.mean_used(rows, (rows - mean) / 7), mean) < 1e-12


# --- The script ---


def test_default_run_passes(default_run):
    script = default_run(9)
    assert script.returncode == 0, script.stderr
    facts = script.json
    assert (facts["lesson"], facts["world_size"], facts["passed"]) == (9, 2, True)
    assert facts["sync_diff"] < 1e-10 < 0.01 < facts["plain_diff"]
    assert facts["parts"] == [10, 20]


def test_one_rank_needs_no_other_process_and_passes(monkeypatch, capsys):
    monkeypatch.setattr(lesson.mp, "spawn", None)  # calling it would be a TypeError
    assert lesson.main(["--nproc", "1", "--json"]) == 0
    verdict, last = capsys.readouterr().out.splitlines()[-2:]
    assert verdict.startswith("PASS ") and json.loads(last)["plain_diff"] == 0.0
    assert not dist.is_initialized()


@pytest.mark.parametrize("nproc", [2, 3, 4, 8])
def test_main_passes_with_what_was_measured(monkeypatch, capsys, measured, nproc):
    monkeypatch.setattr(lesson, "launch_job", lambda *_: measured[nproc])
    assert lesson.main(["--nproc", str(nproc)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{nproc} ranks over gloo on cpu")
    assert lines[-1].startswith("PASS ")
    assert len(lines) == 9 and "nan" not in "".join(lines)


def test_claim_that_is_false_fails(monkeypatch, capsys, measured):
    """main says FAIL and 1 for each part of the claim that does not hold."""

    def verdict(nproc=2, **changes):
        monkeypatch.setattr(lesson, "launch_job", lambda *_: measured[nproc] | changes)
        code = lesson.main(["--nproc", str(nproc)])
        return code, capsys.readouterr().out.splitlines()[-1].split()[0]

    assert verdict() == (0, "PASS")
    nan, infinite = float("nan"), float("inf")
    for change in (
        *({"sync_diff": value} for value in (1e-9, nan)),
        *({"ddp_diff": value} for value in (1e-9, nan)),
        *({"plain_diff": value} for value in (0.0, nan)),
        *({"param_change": value} for value in (0.0, nan, infinite)),
    ):
        assert verdict(**change) == (1, "FAIL"), change
    assert verdict(nproc=1, plain_diff=0.1) == (1, "FAIL")


def break_it(rank, world_size, what):
    """Change one thing in the lesson on this rank, and compare."""
    broken = nn.BatchNorm1d if what == "plain" else lesson.SynchronisedBatchNorm
    if what == "no gradient":
        lesson.SumOverRanks.backward = staticmethod(lambda ctx, gradient: gradient)
    elif what == "biased":
        broken = type("Biased", (broken,), {})
        lerp = torch.Tensor.lerp_
        torch.Tensor.lerp_ = lambda ours, new, weight: lerp(ours, new * 0.99, weight)
    elif what == "nan":
        train = lesson.train
        lesson.train = lambda *args: train(*args) | {"kept": torch.full((17,), float("nan"))}
    elif what == "idle":
        torch.optim.SGD.step = lambda *_: None
    lesson.SynchronisedBatchNorm = broken
    return compare_on_a_rank(rank, world_size)


@pytest.mark.parametrize("what", ["plain", "no gradient", "biased", "nan", "idle"])
def test_main_fails_when_the_technique_is_removed(monkeypatch, capsys, what):
    facts = run(break_it, 2, what)[0]
    monkeypatch.setattr(lesson, "launch_job", lambda *_: facts)
    assert lesson.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL ")


BAD = [
    (["--batch-size", "3"], "--batch-size"),
    (["--batch-size", "7", "--nproc", "4"], "--batch-size"),
    (["--batch-size", "101"], "--batch-size"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=lambda value: " ".join(value))
def test_bad_value_costs_one_line(monkeypatch, capsys, flags, named):
    monkeypatch.setattr(lesson, "launch_job", None)  # calling it would be a TypeError
    with pytest.raises(SystemExit) as exit_:
        lesson.main(flags)
    stdout, stderr = capsys.readouterr()
    assert exit_.value.code == 2 and stdout == ""
    lines = [line for line in stderr.splitlines() if line]
    assert len(lines) == 1 and named in lines[0]


@pytest.mark.parametrize("flags", [{"batch_size": 4}, {"batch_size": 100}, {"steps": 1, "seed": 3}])
def test_smallest_and_largest_values_pass(monkeypatch, capsys, flags):
    facts = run(compare_on_a_rank, 2, *flags.items())[0]
    monkeypatch.setattr(lesson, "launch_job", lambda *_: facts)
    argv = [
        text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", value)
    ]
    assert lesson.main([str(text) for text in argv]) == 0
    capsys.readouterr()


# --- The exercise ---


def test_solution_is_right_on_1_and_4_ranks():
    assert check(solution, nprocs=(1, 4)) is None
