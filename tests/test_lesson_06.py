"""Lesson 06: checkpoints that survive a kill, and from which a job goes on with the same bits."""

import contextlib
import errno
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import cloudpickle
import lesson_06_checkpoint_map_location as lesson
import pytest
import torch
import torch.distributed as dist
from nbtools import RankFailed, run
from torch import nn

# Send the functions of this file to the ranks, so that no rank has to import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
DEADLINE = 90  # seconds within which no process of a job that lost a rank may be left
RANDOM_BYTES = 5056  # the state of torch's CPU generator


def difference(one, other):
    return (one["parameters"] - other["parameters"]).abs().max().item()


def train(nproc, steps, folder=None, dropout=0.2):
    return run(lesson.train, nproc, CPU, steps, 30, 0, folder and str(folder), dropout)


def names(folder):
    return [path.name for path in lesson.checkpoints(folder)]


def damage(path):
    """Change one bit in the middle of the file's largest record."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    header = record.header_offset
    lengths = int.from_bytes(data[header + 26 : header + 28], "little")
    lengths += int.from_bytes(data[header + 28 : header + 30], "little")
    data[header + 30 + lengths + record.file_size // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole():
    """Return {world size: what each rank returned after 12 steps without a stop}."""
    return {nproc: train(nproc, 12) for nproc in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return {world size: a folder with the checkpoints of a job that was killed after step 5}."""
    folders = {}
    for nproc in (1, 2, 3, 4):
        folders[nproc] = tmp_path_factory.mktemp(f"of {nproc} ranks")
        with pytest.raises(RankFailed, match="killed by SIGKILL"):
            run(killed_after, nproc, 5, str(folders[nproc]))
    return folders


def killed_after(rank, world_size, steps, folder):
    lesson.train(rank, world_size, CPU, steps, 30, 0, folder)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def folder(stopped, tmp_path):
    """Return a copy of the folder of the two killed ranks."""
    return Path(shutil.copytree(stopped[2], tmp_path / "with a space"))


# --- A job goes on as if nothing had happened ---


@pytest.mark.claim("B7")
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_five_steps_a_kill_and_seven_steps_equal_twelve(whole, stopped, tmp_path, nproc):
    copy = shutil.copytree(stopped[nproc], tmp_path / "copy")
    resumed = train(nproc, 12, copy)
    for ours, theirs in zip(resumed, whole[nproc], strict=True):
        assert ours["saved"]["step"] == 5
        assert (ours["saved"]["epoch"], ours["saved"]["rows"]) == (1, {4: 28}.get(nproc, 30))
        assert torch.equal(ours["parameters"], theirs["parameters"])
        assert ours["parameters"].isfinite().all() and len(ours["parameters"]) == 12
        assert (ours["step"], ours["epoch"]) == (theirs["step"], theirs["epoch"]) == (12, 3)
    assert resumed[0]["losses"] == whole[nproc][0]["losses"] and len(resumed[0]["losses"]) == 12
    assert whole[nproc][0]["losses"][-1] < whole[nproc][0]["losses"][0]  # and it has learned
    assert names(copy) == ["step_00000011.pt", "step_00000012.pt"]


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("step", [3, 4, 11])
def test_any_step_is_a_good_place_to_stop(whole, tmp_path, nproc, step):
    """In the first epoch, at the end of one, after a change of the learning rate."""
    train(nproc, step, tmp_path)
    resumed = train(nproc, 12, tmp_path)
    assert resumed[0]["saved"]["step"] == step
    assert [difference(*pair) for pair in zip(resumed, whole[nproc], strict=True)] == [0.0] * nproc


FORGET = {
    "momentum": lambda state: state["optimizer"].update(state={}),
    "schedule": lambda state: (
        state["optimizer"]["param_groups"][0].update(lr=0.03),
        state["schedule"].update(last_epoch=0, _last_lr=[0.03]),
    ),
    "position": lambda state: state.update(rows=0),
    "random": lambda state: state.update(
        random={rank: torch.Generator().manual_seed(rank).get_state() for rank in state["random"]}
    ),
    "random of rank 1": lambda state: state["random"].update({1: state["random"][0]}),
    "model": lambda state: state["model"]["1.weight"].zero_(),
    "nothing": lambda state: None,
}


def train_forgetful(rank, world_size, folder, forget):
    load = lesson.load_together

    def load_less(*args):
        state = load(*args)
        forget(state)
        return state

    lesson.load_together = load_less
    return lesson.train(rank, world_size, CPU, 12, 30, 0, str(folder))


@pytest.mark.claim("B7")
@pytest.mark.parametrize("part", FORGET)
def test_each_part_is_needed(whole, folder, part):
    resumed = run(train_forgetful, 2, folder, FORGET[part])
    if part == "nothing":
        assert difference(resumed[0], whole[2][0]) == 0.0
    else:
        assert difference(resumed[0], whole[2][0]) > 0.01
    assert difference(resumed[0], resumed[1]) == 0.0  # no comparison of ranks would find it


def targets_used(rank, world_size, steps, folder):
    """Return the targets that this rank has used in each step."""
    used, mean_loss = [], nn.functional.mse_loss

    def watched(outputs, targets):
        used.append(targets.tolist())
        return mean_loss(outputs, targets)

    nn.functional.mse_loss = watched
    lesson.train(rank, world_size, CPU, steps, 30, 0, str(folder))
    return used


def test_each_epoch_has_every_row_once_in_a_new_order_also_after_a_stop(tmp_path):
    before, after = run(targets_used, 2, 5, tmp_path), run(targets_used, 2, 12, tmp_path)
    steps = [list(pair) for pair in zip(*before, strict=True)]
    steps += [list(pair) for pair in zip(*after, strict=True)]
    assert len(steps) == 12
    epochs = []
    for first in (0, 4, 8):
        rows = [row for step in steps[first : first + 4] for rank in step for row in rank]
        assert len(rows) == len({tuple(row) for row in rows}) == 100
        epochs.append(rows)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_making_an_iterator_draws_from_the_generator():
    """So a script that restores its random state before that does not go on where it stopped."""
    before = torch.get_rng_state()
    iter(torch.utils.data.DataLoader([1, 2, 3]))
    assert not torch.equal(torch.get_rng_state(), before)


def without_first_backward(rank, world_size, steps, folder):
    backward, calls = torch.Tensor.backward, []

    def skip_the_first(tensor, *args, **kwargs):
        calls.append(tensor)
        if len(calls) > 1:
            backward(tensor, *args, **kwargs)

    torch.Tensor.backward = skip_the_first
    reducer = lesson.nn.parallel.DistributedDataParallel

    class Unprepared(reducer):
        """Forget the forward pass that was not followed by a backward pass."""

        def forward(self, *inputs, **kwargs):
            with torch.no_grad() if not calls else contextlib.nullcontext():
                return super().forward(*inputs, **kwargs)

    lesson.nn.parallel.DistributedDataParallel = Unprepared
    return lesson.train(rank, world_size, CPU, steps, 30, 0, folder)


def test_the_first_backward_matters_for_the_last_bit(tmp_path, whole):
    """Without it, a resumed job of 4 ranks adds its first gradients in another order."""
    run(without_first_backward, 4, 5, str(tmp_path))
    resumed = run(without_first_backward, 4, 12, str(tmp_path))
    never_stopped = run(without_first_backward, 4, 12, None)
    assert 0.0 < difference(resumed[0], never_stopped[0]) < 1e-5


def test_world_sizes_can_change(whole, stopped, tmp_path):
    for before, now in ((2, 3), (3, 2), (4, 1), (1, 4)):
        copy = shutil.copytree(stopped[before], tmp_path / f"{before} {now}")
        resumed = train(now, 12, copy)
        assert [ours["saved"]["step"] for ours in resumed] == [5] * now
        assert all(difference(ours, resumed[0]) == 0.0 for ours in resumed)
        assert 0.0 < difference(resumed[0], whole[now][0]) < 2.0
        assert len(torch.load(lesson.checkpoints(copy)[-1])["random"]) == now


def saved_on_a_gpu(state):
    """Make it look like a checkpoint of two ranks on GPUs: their generators have 16 bytes."""
    state["by"] = "2 ranks on cuda"
    state["random"] = {rank: torch.zeros(16, dtype=torch.uint8) for rank in (0, 1)}


def test_another_kind_of_device_has_another_random_state(whole, folder):
    resumed = run(train_forgetful, 2, folder, saved_on_a_gpu)
    assert resumed[0]["saved"]["step"] == 5
    assert 0.0 < difference(resumed[0], whole[2][0]) < 2.0


def test_without_dropout_another_world_size_changes_only_the_rounding(tmp_path):
    """30 rows per step on 1 rank and on 2: the same rows, the same mean."""
    for before, now in ((1, 2), (2, 1)):
        folder = tmp_path / f"{before}"
        folder.mkdir()
        train(before, 5, folder, dropout=0.0)
        resumed, whole = train(now, 12, folder, 0.0), train(now, 12, None, 0.0)
        assert difference(resumed[0], whole[0]) < 1e-5
        assert difference(resumed[0], train(now, 5, None, 0.0)[0]) > 0.01


# --- Saving ---


def save_watched(rank, world_size, folder):
    """Save on all ranks, rank 0 slowly; return what this rank did, when, and how many bytes."""
    events, save, gather = [], lesson.save_atomically, dist.gather

    def slow_save(*args):
        time.sleep(0.5)
        written = save(*args)
        events.append("saved")
        return written

    def watched_gather(tensor, others):
        events.append((str(tensor.dtype), tensor.nbytes))
        gather(tensor, others)

    lesson.save_atomically, lesson.dist.gather = slow_save, watched_gather
    torch.manual_seed(rank)
    generator = torch.default_generator
    state = {"step": 7, "tensor": torch.full((4,), 5.0)}
    dist.barrier()
    start = time.monotonic()
    written = lesson.save_together(state, folder, generator, CPU)
    waited = time.monotonic() - start
    return events, written, waited, os.listdir(folder)


@pytest.mark.claim("A17")
@pytest.mark.parametrize("nproc", [1, 3])
def test_only_rank_0_writes_and_the_others_wait(tmp_path, nproc):
    answers = run(save_watched, nproc, str(tmp_path))
    for rank, (events, written, waited, seen) in enumerate(answers):
        assert events == [("torch.uint8", RANDOM_BYTES)] + ["saved"] * (rank == 0)
        assert (written > 0) == (rank == 0)
        assert waited > 0.4  # rank 0 sleeps for half a second: a lower limit, not a speed
        assert seen == ["step_00000007.pt"]
    state = torch.load(tmp_path / "step_00000007.pt")
    assert os.path.getsize(tmp_path / "step_00000007.pt") == answers[0][1]
    for rank in range(nproc):
        expected = torch.Generator().manual_seed(rank).get_state()
        assert torch.equal(state["random"][rank], expected)
    assert len(state["random"]) == nproc


def replicas(rank, world_size):
    facts = lesson.train(rank, world_size, CPU, 4)
    return facts["parameters"]


@pytest.mark.claim("A17")
def test_the_file_of_one_rank_is_that_of_all(tmp_path):
    train(3, 4, tmp_path)
    state = lesson.load_latest(tmp_path)
    flat = torch.cat([tensor.flatten() for tensor in state["model"].values()])
    for parameters in run(replicas, 3):
        assert torch.equal(parameters, flat)


@pytest.mark.claim("A8")
def test_keys_have_no_prefix_and_load_without_ddp(folder):
    state = lesson.load_latest(folder)
    assert list(state["model"]) == ["1.weight", "1.bias"]
    nn.Sequential(nn.Dropout(), nn.Linear(5, 2)).load_state_dict(state["model"])


def wrapped_keys(rank, world_size):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(5, 2))
    try:
        nn.Linear(5, 2).load_state_dict(replica.state_dict())
    except RuntimeError as error:
        return list(replica.state_dict()), list(replica.module.state_dict()), str(error)


@pytest.mark.claim("A8")
def test_state_dict_of_the_wrapper_does_not_fit_a_plain_model():
    wrapped, plain, error = run(wrapped_keys, 1)[0]
    assert wrapped == [f"module.{key}" for key in plain]
    assert 'Unexpected key(s) in state_dict: "module.weight"' in error


def stepper(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(3, 5)

    def step(batch=batch):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()

    return batch, step


@pytest.mark.claim("A16")
def test_moving_a_module_moves_the_live_model():
    """From the CPU to `meta`, a device without data, since there may be no GPU to come from."""
    model = nn.Linear(5, 2)
    batch, step = stepper(model)
    step()
    copies = {key: tensor.to("meta") for key, tensor in model.state_dict().items()}
    assert {tensor.device.type for tensor in copies.values()} == {"meta"}
    assert model.weight.device.type == "cpu"
    step()  # the live model is where it was
    assert model.to("meta") is model and model.weight.device.type == "meta"
    with pytest.raises(RuntimeError, match=r"not on the expected device|same device"):
        step()
    step(batch.to(model.weight.device))  # no error: it goes on elsewhere


@pytest.mark.gpu
@pytest.mark.claim("A15", "A16")
def test_on_a_gpu_the_article_s_cure_moves_the_live_model(tmp_path):
    model = nn.Linear(5, 2).cuda()
    batch, step = stepper(model)
    state = lesson.on_cpu({"model": model.state_dict()})
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    assert model.weight.device.type == "cuda"
    step(batch.cuda())
    lesson.save_atomically(state, tmp_path, 1)
    before = torch.cuda.memory_allocated()
    lesson.load_latest(tmp_path)
    assert torch.cuda.memory_allocated() == before
    model.cpu().state_dict()
    with pytest.raises(RuntimeError):
        step(batch.cuda())
    step(batch)


@pytest.mark.claim("A15", "A16")
def test_on_cpu_asks_every_tensor_and_changes_nothing():
    model = nn.Linear(5, 2, device="meta")  # a stand-in for a GPU; its .cpu() would raise
    asked = []

    class Elsewhere(torch.Tensor):
        def cpu(self):
            asked.append(self.shape)
            return torch.zeros(self.shape)

    tensors = {key: tensor.as_subclass(Elsewhere) for key, tensor in model.state_dict().items()}
    state = {"model": tensors, "optimizer": {"state": {0: {"momentum": tensors["weight"]}}}}
    state["optimizer"]["param_groups"] = [{"lr": tensors["bias"]}]
    state |= {"step": 3, "losses": [1.0]}
    copy = lesson.on_cpu(state)
    assert asked == [(2, 5), (2,), (2, 5), (2,)]
    assert copy["optimizer"]["param_groups"][0]["lr"].device.type == "cpu"
    assert copy["optimizer"]["state"][0]["momentum"].device.type == "cpu"
    assert (copy["step"], copy["losses"]) == (3, [1.0])
    assert state["model"]["weight"] is tensors["weight"]
    assert model.weight.device.type == "meta"


# --- All ranks load the same ---


def copy_of(stopped, tmp_path, rank, *steps):
    """Return a folder of this rank alone, with the checkpoints of these steps."""
    folder = tmp_path / f"on rank {rank}" / "checkpoints"
    folder.mkdir(parents=True)
    for step in steps:
        shutil.copy(lesson.checkpoints(stopped[2])[step - 4], folder)
    return folder


def in_a_folder_of_its_own(rank, world_size, folders, steps):
    """Train; return what this rank has loaded and made, or why the lesson ended the run."""
    try:
        facts = lesson.train(rank, world_size, CPU, steps, 30, 0, str(folders[rank]))
    except SystemExit as stop:
        return stop.code
    return facts


OTHER = {  # what this rank has, where the others have the files of steps 4 and 5
    "an older one": lambda folder: (folder / "step_00000005.pt").unlink(),
    "no file": lambda folder: [path.unlink() for path in lesson.checkpoints(folder)],
    "no folder": shutil.rmtree,
    "other bytes": lambda folder: lesson.save_atomically(
        lesson.load_latest(folder) | {"rows": 60}, folder, 5
    ),
    "damage": lambda folder: damage(folder / "step_00000005.pt"),
    "a FIFO": lambda folder: (
        (folder / "step_00000005.pt").unlink(),
        os.mkfifo(folder / "step_00000005.pt"),
    ),
    "more than nothing": lambda folder: None,  # the others have nothing
}
WORDS = {
    "an older one": "rank 0 loads step_00000005.pt, this rank sees step_00000004.pt",
    "no file": "rank 0 loads step_00000005.pt, this rank sees nothing",
    "no folder": "No such file or directory",
    "other bytes": "step_00000005.pt has other bytes than on rank 0",
    "damage": "a checksum is wrong",
    "a FIFO": "it is not a file",
    "more than nothing": "rank 0 sees nothing, this rank sees step_00000005.pt",
}


@pytest.mark.claim("A17", "B7")
@pytest.mark.parametrize("other", OTHER)
def test_a_rank_that_sees_something_else_ends_the_run_and_is_named(stopped, tmp_path, other):
    """Each rank has a folder of its own, as on the disk of each machine; rank 2's is different."""
    steps = () if other == "more than nothing" else (4, 5)
    folders = [copy_of(stopped, tmp_path, rank, *steps) for rank in (0, 1)]
    folders.append(copy_of(stopped, tmp_path, 2, 4, 5))
    OTHER[other](folders[2])
    before = sorted(tmp_path.rglob("*"))
    answers = run(in_a_folder_of_its_own, 3, folders, 12)
    assert len(set(answers)) == 1  # on every rank: none waits, and none goes on
    assert answers[0].startswith(f"rank 2: checkpoints in {folders[2]}: ")
    assert WORDS[other] in answers[0] and "\n" not in answers[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_bytes_in_two_folders_are_good_enough(stopped, tmp_path, whole):
    """Rank 1 has a newer file as well, but rank 0 chooses."""
    folders = [copy_of(stopped, tmp_path, 0, 4), copy_of(stopped, tmp_path, 1, 4, 5)]
    resumed = run(in_a_folder_of_its_own, 2, folders, 12)
    assert [ours["saved"]["step"] for ours in resumed] == [4, 4]
    assert [difference(*pair) for pair in zip(resumed, whole[2], strict=True)] == [0.0, 0.0]


def test_if_rank_0_can_t_choose_no_rank_waits(folder):
    for path in lesson.checkpoints(folder):
        path.write_text("damaged")
    answers = run(in_a_folder_of_its_own, 2, [folder, folder], 12)
    assert answers[0] == answers[1]
    assert answers[0].startswith(f"rank 0: checkpoints in {folder}: no checkpoint is intact")


# --- Loading ---


def write_with_tag(path, tag, value=1.0):
    """Save a tensor of 4,000 bytes in a file that says that it comes from the device `tag`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: tag)
        torch.save({"weight": torch.full((1000,), value)}, path)


@pytest.fixture
def from_gpu(tmp_path):
    write_with_tag(tmp_path / "from_gpu.pt", "cuda:1")
    return tmp_path / "from_gpu.pt"


@pytest.mark.claim("A15")
def test_file_of_a_missing_device_raises_the_article_s_error(monkeypatch, from_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1."
    with pytest.raises(RuntimeError, match=re.escape(words)):
        torch.load(from_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = (
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False"
    )
    with pytest.raises(RuntimeError, match=re.escape(words)):
        torch.load(from_gpu)


MAPS = {
    "string": "cpu",
    "device": CPU,
    "dict": {"cuda:1": "cpu"},
    "function": lambda storage, location: storage,
}


@pytest.mark.claim("A15")
@pytest.mark.parametrize("form", MAPS)
def test_every_form_of_map_location_loads_it(from_gpu, form):
    weight = torch.load(from_gpu, map_location=MAPS[form])["weight"]
    assert weight.device == CPU and torch.equal(weight, torch.ones(1000))


@pytest.mark.claim("A15")
def test_a_dict_maps_only_what_it_names(monkeypatch, from_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="Attempting to deserialize"):
        torch.load(from_gpu, map_location={"cuda:0": "cpu"})


def places_asked_for(path):
    """Return {device: bytes} that the storages of the file ask for."""
    asked = {}

    def note(storage, location):
        asked[location] = asked.get(location, 0) + storage.nbytes()
        return storage

    torch.load(path, map_location=note)
    return asked


@pytest.mark.claim("A15", "B7")
def test_every_rank_would_load_to_the_device_that_the_file_names(tmp_path):
    path = tmp_path / "from_gpu.pt"
    write_with_tag(path, "cuda:0")
    answers = run(lambda rank, world_size: places_asked_for(path), 4)
    assert answers == [{"cuda:0": 4000}] * 4  # 16,000 bytes on one device


@pytest.mark.claim("A15", "A16", "B7")
def test_the_lesson_s_file_names_only_the_cpu_and_is_loaded_there(folder, monkeypatch):
    path = lesson.checkpoints(folder)[-1]
    assert set(places_asked_for(path)) == {"cpu"}
    locations, load = [], torch.load

    def watched(*args, **options):
        locations.append((options.get("map_location"), options.get("weights_only")))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", watched)
    lesson.load_latest(folder)
    assert locations == [("cpu", True)]


@pytest.mark.claim("A15")
def test_load_latest_needs_no_device_of_the_file(tmp_path):
    write_with_tag(tmp_path / "step_00000001.pt", "cuda:1", 3.0)
    assert torch.equal(lesson.load_latest(tmp_path)["weight"], torch.full((1000,), 3.0))


# --- Nothing is lost ---


def constant_saver(folder, first, size, pipe):
    """Save for ever; after each save tell its number. Runs in a process that will be killed."""
    torch.set_num_threads(1)
    for step in range(first, first + 100_000):
        tensor = torch.full((size,), float(step))
        lesson.save_atomically({"step": step, "tensor": tensor}, folder, step)
        pipe.send(step)


@pytest.mark.claim("A17", "B7")
def test_thirty_kills_in_constant_saving_lose_nothing(tmp_path):
    context = multiprocessing.get_context("forkserver")
    chance, last, unfinished = random.Random(6), 0, 0
    for _ in range(30):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=constant_saver, args=(tmp_path, last + 1, 500_000, sender))
        child.start()
        sender.close()
        assert receiver.poll(60)
        told = receiver.recv()  # the first one is saved: now it is busy with the next ones
        time.sleep(chance.random() * 0.03)
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while True:
                told = receiver.recv()
        state = lesson.load_latest(tmp_path)
        assert state["complaints"] == []
        assert state["step"] >= told  # what was reported as saved is there
        assert state["step"] <= told + 1
        assert torch.equal(state["tensor"], torch.full((500_000,), float(state["step"])))
        assert 1 <= len(names(tmp_path)) <= 3  # a third: killed before removal
        unfinished += (tmp_path / lesson.UNFINISHED).exists()
        last = state["step"]
    assert unfinished > 0  # kills did hit the middle of a save, or the test would show nothing
    lesson.save_atomically({"step": last + 1}, tmp_path, last + 1)
    assert len(names(tmp_path)) == 2 and not (tmp_path / lesson.UNFINISHED).exists()


def killed_at_random(rank, world_size, folder, steps, delay):
    """Train; this rank kills itself `delay` seconds after the first save, wherever it is then."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    save = lesson.save_together

    def save_and_start_the_timer(*args):
        written = save(*args)
        if timer.ident is None:
            timer.start()
        return written

    lesson.save_together = save_and_start_the_timer
    facts = lesson.train(rank, world_size, CPU, steps, 30, 0, folder)
    timer.cancel()
    return facts


@pytest.mark.claim("B7")
def test_a_job_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    chance, steps = random.Random(6), 100_000  # more than it can make before the last kill
    for _ in range(5):
        with pytest.raises(RankFailed, match=r"SIGKILL|Connection"):
            run(killed_at_random, 2, str(tmp_path), steps, 0.05 + 0.2 * chance.random())
    reached = lesson.load_latest(tmp_path)["step"]
    assert reached >= 5
    resumed = run(killed_at_random, 2, str(tmp_path), reached + 5, 60.0)
    assert resumed[0]["saved"]["step"] == reached and resumed[0]["step"] == reached + 5
    for ours, theirs in zip(resumed, train(2, reached + 5), strict=True):
        assert torch.equal(ours["parameters"], theirs["parameters"])
        assert len(ours["losses"]) == len(theirs["losses"]) == reached + 5


DAMAGES = {
    "one bit": damage,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "not a file": lambda path: (path.unlink(), path.mkdir()),
    "text": lambda path: path.write_text("weights"),
}


@pytest.mark.claim("B7")
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_latest_file_is_named_and_the_one_before_is_used(folder, kind):
    DAMAGES[kind](folder / "step_00000005.pt")
    state = lesson.load_latest(folder)
    assert state["step"] == 4
    (line,) = state["complaints"]
    assert line.startswith("step_00000005.pt can't be used: ")
    assert len(line) > 35 and "\n" not in line


def test_torch_load_alone_does_not_see_a_changed_bit(folder):
    path = folder / "step_00000005.pt"
    good = torch.load(path)
    damage(path)
    bad = torch.load(path)  # no error
    same = [torch.equal(good["random"][rank], bad["random"][rank]) for rank in (0, 1)]
    assert same.count(False) == 1


def test_damaged_job_goes_on_from_the_file_before(folder, whole):
    damage(folder / "step_00000005.pt")
    resumed = train(2, 12, folder)
    assert resumed[0]["saved"]["step"] == 4
    assert difference(resumed[0], whole[2][0]) == 0.0
    assert names(folder) == ["step_00000011.pt", "step_00000012.pt"]


def test_newer_damaged_file_does_not_cost_a_good_one(tmp_path):
    (tmp_path / "step_00000009.pt").write_text("damaged")
    for step in (1, 2, 3):
        lesson.save_atomically({"step": step}, tmp_path, step)
    assert names(tmp_path) == [f"step_0000000{step}.pt" for step in (2, 3, 9)]
    assert lesson.load_latest(tmp_path)["step"] == 3


def test_what_others_keep_in_the_folder_is_neither_used_nor_lost(folder, whole):
    """Names that only look like ours, a FIFO, a device, and a file of another program."""
    others = ["step_00000003_best.pt", "step_0.md", "step_9.pt", "unfinished.tmp"]
    for name in others:
        (folder / name).write_text(f"this is {name}")
    torch.save({"weights": torch.ones(3)}, folder / "step_00000020.pt")
    os.mkfifo(folder / "step_00000021.pt")
    (folder / "step_00000022.pt").symlink_to("/dev/zero")
    (folder / "step_00000001.pt").mkdir()
    (folder / lesson.UNFINISHED).symlink_to(folder / "step_0.md")  # ours goes, its target stays
    resumed = train(2, 12, folder)
    assert resumed[0]["saved"]["step"] == 5 and difference(resumed[0], whole[2][0]) == 0.0
    lines = resumed[0]["saved"]["complaints"]
    assert [line[:16] for line in lines] == [f"step_000000{n}.pt" for n in (22, 21, 20)]
    assert "not a file" in lines[0] and "another program" in lines[2]
    assert [(folder / name).read_text() for name in others] == [f"this is {n}" for n in others]
    ours = [f"step_000000{n:02}.pt" for n in (1, 11, 12, 20, 21, 22)]
    assert sorted(os.listdir(folder)) == sorted([*ours, *others])
    with pytest.raises(FileExistsError, match=r"not a file.*step_00000021"):
        lesson.save_atomically({"step": 21}, folder, 21)


def test_if_all_are_damaged_it_says_so(folder):
    for path in lesson.checkpoints(folder):
        path.write_text("damaged")
    with pytest.raises(OSError, match=r"no checkpoint is intact .*step_00000005.*step_00000004"):
        lesson.load_latest(folder)


def test_empty_folder_is_a_new_start(tmp_path):
    assert lesson.load_latest(tmp_path) is None


def test_data_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """The order of the calls; only a power cut could show the result."""
    calls = []

    def watch(module, name, note):
        real = getattr(module, name)

        def watching(*args, **options):
            calls.append(note(*args))
            return real(*args, **options)

        monkeypatch.setattr(module, name, watching)

    kinds = {True: "fsync folder", False: "fsync file"}
    watch(os, "fsync", lambda handle: kinds[Path(f"/dev/fd/{handle}").resolve() == tmp_path])
    watch(os, "replace", lambda old, new: f"rename {old.name} {new.name}")
    watch(Path, "unlink", lambda path: f"remove {path.name}")
    for step in (1, 2, 3):
        calls.clear()
        lesson.save_atomically({"step": step}, tmp_path, step)
    rename = f"rename {lesson.UNFINISHED} step_00000003.pt"
    assert [call for call in calls if lesson.UNFINISHED not in call or call == rename] == [
        "fsync file",
        rename,
        "fsync folder",
        "remove step_00000001.pt",
    ]


def save_on_a_full_disk(rank, world_size, folder, room):
    """Train; from step 8 on a file can't grow beyond `room` bytes."""
    save = lesson.save_atomically

    def limited(state, folder, step):
        if step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return save(state, folder, step)

    lesson.save_atomically, output = limited, io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            return lesson.main(["--checkpoints", folder])
        except SystemExit as stop:
            return str(stop.code)


@pytest.mark.parametrize("room", [0, 100, 5000])
def test_full_disk_is_an_error_and_the_old_checkpoint_is_intact(folder, room):
    (answer,) = run(save_on_a_full_disk, 1, str(folder), room)  # a world of one goes on
    words = os.strerror(errno.EFBIG)
    assert answer == f"rank 0: checkpoints in {folder}: [Errno {errno.EFBIG}] {words}"
    assert names(folder) == ["step_00000006.pt", "step_00000007.pt"]
    state = lesson.load_latest(folder)
    assert (state["step"], state["complaints"]) == (7, [])
    assert not (folder / lesson.UNFINISHED).exists()


def full_disk_on_two(rank, world_size, folder):
    return save_on_a_full_disk(rank, world_size, folder, 100)


def test_full_disk_ends_the_other_ranks_as_well(folder):
    """Rank 0 leaves; the others lose it, and none waits for the timeout of the group."""
    try:
        answers = run(full_disk_on_two, 2, str(folder), deadline=100)
        assert "rank 0" in answers[0]
    except RankFailed as error:
        assert "no answer" not in str(error)  # after 100 s; the group would wait for 120
    assert lesson.load_latest(folder)["step"] == 7


def test_folder_that_can_t_be_written_is_an_error(tmp_path):
    """Also for root: below a file there can be no folder, and /proc takes no new file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        lesson.save_atomically({"step": 1}, tmp_path / "file", 1)
    with pytest.raises(OSError):
        lesson.save_atomically({"step": 1}, tmp_path / "missing", 1)
    if os.path.isdir("/proc/self"):
        with pytest.raises(OSError):
            lesson.save_atomically({"step": 1}, "/proc/self", 1)
    assert os.listdir(tmp_path) == ["file"]


class Payload:
    """Would write a file when it is loaded: harmless, but it shows that code has run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_file_with_code_is_refused_and_the_code_does_not_run(folder, tmp_path):
    proof = tmp_path / "the code has run"
    torch.save({"model": Payload(proof)}, folder / "step_00000006.pt")
    state = lesson.load_latest(folder)
    assert state["step"] == 5 and not proof.exists()
    assert re.fullmatch(r"step_00000006.pt can't be used: UnpicklingError.*", *state["complaints"])
    torch.load(folder / "step_00000006.pt", weights_only=False)  # so the payload is one
    assert proof.exists()


# --- The script ---


def test_script_passes(default_run):
    finished = default_run(6)
    assert finished.returncode == 0, finished.stderr
    result = finished.json
    assert (result["lesson"], result["world_size"], result["passed"]) == (6, 2, True)
    assert (result["resumed_from_step"], result["max_param_diff"]) == (5, 0.0)
    assert result["checkpoints_kept"] == 2
    assert result["bytes_written"] > 12 * 2 * RANDOM_BYTES  # 12 files, 2 states in each
    assert "OMP_NUM_THREADS" not in finished.stderr


def test_terminated_rank_leaves_no_folder(tmp_path):
    """A launcher sends SIGTERM to the ranks that are left when one has died."""
    command = [sys.executable, lesson.__file__, "--steps", "100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 180
        while not list(tmp_path.glob("tmp*/step_*")) and time.monotonic() < end:
            time.sleep(0.05)
        assert list(tmp_path.glob("tmp*/step_*"))
        process.terminate()
        _, stderr = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stderr) == (143, "")
    assert list(tmp_path.glob("tmp*")) == []


def main_with(rank, world_size, flags):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = lesson.main([*map(str, flags)])
    return code, output.getvalue()


def errors_of_main(rank, world_size, folder):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code, output = main_with(rank, world_size, ["--checkpoints", folder])
    return code, output, errors.getvalue()


def test_main_names_the_damaged_file_in_one_line_and_passes(folder):
    damage(folder / "step_00000005.pt")
    (code, output, errors), (code_1, _, errors_1) = run(errors_of_main, 2, str(folder))
    assert (code, code_1) == (0, 0)
    assert errors == "step_00000005.pt can't be used: ValueError('a checksum is wrong')\n"
    assert errors_1 == ""
    assert "resumed from step 4, " in output and "by 0.0 from" in output


def broken_main(rank, world_size, what, folder):
    tempfile.tempdir = folder  # main makes its own folder in it
    train = lesson.train

    def changed(*args):
        facts = train(*args)
        if what == "resumed" and facts["saved"] and rank == 1:
            facts["parameters"] = facts["parameters"] + 1e-7
        if what == "nan":
            facts["parameters"] = facts["parameters"] * float("nan")
        return facts

    if what == "idle":
        torch.optim.SGD.step = lambda *_: None
    lesson.train = changed
    return main_with(rank, world_size, [])


@pytest.mark.parametrize("what", ["nothing", "resumed", "nan", "idle"])
def test_main_fails_when_the_bits_differ_or_nothing_was_trained(what, tmp_path):
    answers = run(broken_main, 2, what, str(tmp_path))
    assert [code for code, _ in answers] == [int(what != "nothing")] * 2
    verdict = "PASS " if what == "nothing" else "FAIL "
    assert answers[0][1].splitlines()[-1].startswith(verdict)
    assert answers[1][1] == ""
    assert list(tmp_path.glob("tmp*")) == []  # and it is gone


def test_two_runs_in_one_folder_after_each_other_go_on(tmp_path):
    first = run(main_with, 1, ["--checkpoints", str(tmp_path)])[0]
    second = run(main_with, 1, ["--checkpoints", str(tmp_path), "--steps", 15])[0]
    assert (first[0], second[0]) == (0, 0)
    assert "resumed from step 5, " in first[1] and "resumed from step 12, " in second[1]


def save_often(rank, world_size, folder):
    """Save again and again, as if each rank were a job of its own."""
    for step in range(60):
        state = {"step": 2 * step + rank, "tensor": torch.full((100_000,), float(rank))}
        lesson.save_atomically(state, folder, state["step"])
    dist.barrier()
    return True


def test_two_jobs_in_one_folder_damage_nothing(tmp_path):
    assert run(save_often, 2, str(tmp_path), deadline=120) == [True, True]
    state = lesson.load_latest(tmp_path)
    assert (state["step"], state["complaints"]) == (119, [])
    assert 2 <= len(names(tmp_path)) <= 3  # a third: the older job was the last to remove
    assert not (tmp_path / lesson.UNFINISHED).exists()


def test_no_bits_are_promised_once_the_number_of_ranks_has_changed(tmp_path):
    """2, 3 and again 3 ranks: the last two are the same, but the model is not that of 3 ranks."""
    outputs = []
    for nproc, steps in ((2, 4), (3, 6), (3, 8)):
        flags = ["--checkpoints", tmp_path, "--steps", steps]
        code, output = run(main_with, nproc, flags)[0]
        assert code == 0, output
        outputs.append(output)
    assert "saved by" not in outputs[0] and "saved by 2 ranks on " in outputs[1]
    assert ": dropout and rounding are now different" in outputs[1]
    assert re.search("saved by 2 ranks on .* and 3 ranks on ", outputs[2])


def bad_folder(tmp_path, kind):
    if kind == "file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file"
    if kind == "damaged":
        (tmp_path / "step_00000001.pt").write_text("damaged")
    if kind == "done":
        state = {"seed": 0, "batch_size": 30, "step": 12, "makers": []}
        lesson.save_atomically(state, tmp_path, 12)
    if kind == "other seed":
        state = {"seed": 1, "batch_size": 30, "step": 2, "makers": []}
        lesson.save_atomically(state, tmp_path, 2)
    if kind == "other program":
        lesson.save_atomically({"weights": torch.zeros(3)}, tmp_path, 2)
    return tmp_path / "missing" if kind == "missing" else tmp_path


KINDS = [
    "file",
    "missing",
    "damaged",
    "done",
    "other seed",
    "other program",
    "not writable",
    "flags",
]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_values_cost_one_line_and_start_nothing(monkeypatch, capsys, tmp_path, kind):
    monkeypatch.setattr(lesson, "setup", None)  # calling it would be a TypeError
    folder = bad_folder(tmp_path, kind)
    before = sorted(os.listdir(tmp_path))
    if kind == "not writable":
        monkeypatch.setattr(lesson.os, "access", lambda *_: False)  # root can write
    cases = [["--checkpoints", str(folder)]]
    if kind == "flags":
        cases = [["--steps", "1"], ["--batch-size", "0"], ["--checkpoints"]]
    for flags in cases:
        with pytest.raises(SystemExit) as stop:
            lesson.main(flags)
        stdout, stderr = capsys.readouterr()
        assert (stop.value.code, stdout) == (2, "")
        lines = [line for line in stderr.splitlines() if line]
        assert len(lines) == 1 and flags[0] in lines[0]
    assert sorted(os.listdir(tmp_path)) == before


def test_fewer_rows_than_ranks_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert lesson.parse_args(["--batch-size", "4"]).batch_size == 4
    with pytest.raises(SystemExit) as stop:
        lesson.parse_args(["--batch-size", "3"])
    assert stop.value.code == 2 and "--batch-size" in capsys.readouterr().err
