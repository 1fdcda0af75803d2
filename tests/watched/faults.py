"""Faults, each an edit of a clean script, and what the check must say of them.

FAULTS = {name: (script, {text: text in its place}, kind, strength, words in the named line)}
"a|b" are two kinds, of which one must come; "" are the words where no line is asked for.
"""

WRONG, NOT_MEANT, TO_KNOW = "wrong", "probably not meant", "to know"
D, H, S, N, F = "ddp.py", "by_hand.py", "stream.py", "noisy.py", "shard.py"
P = "half.py"

SAMPLER = "DataLoader(data, 8, sampler=sampler)"
NO_EPOCH = {"sampler.set_epoch(epoch)": "pass"}
STEP = "            optimizer.step()\n            schedule"
REDUCE = "    dist.all_reduce(right)\n"
SUM = "            parameter.grad /= world_size\n"
OTHER = "    other = torch.ones(2)\n"
SWAPPED = OTHER + (
    "    if rank == 0:\n        dist.all_reduce(other)\n        dist.all_reduce(right)\n"
    "    else:\n        dist.all_reduce(right)\n        dist.all_reduce(other)\n"
)
END = "dist.destroy_process_group()"
ONCE_MORE = (
    "last = torch.ones(1)\nmean(last)\nif rank == 1:\n    mean(2 * last)\nmean(last)\n" + END
)
SKIP = (
    "            if rank == 0 or epoch == 0 or len(rows) == 8:\n                optimizer.step()\n"
)
HALF = (
    "    if rank == 0:\n        model.load_state_dict("
    "{k: v / 2 for k, v in model.state_dict().items()})\n    optimizer = torch"
)
ONE_PART = "rows.chunk(1), labels.chunk(1)"
WRITER = "    sampler = DistributedSampler(data)\n"
BOARD = (
    "    from torch.utils.tensorboard import SummaryWriter\n"
    "    board = SummaryWriter(FOLDER)\n    board.add_scalar('loss', 1.0, 0)\n"
) + WRITER
TWICE = (
    "class Twice(nn.Module):\n    def __init__(self, block):\n        super().__init__()\n"
    "        self.block = block\n\n    def forward(self, x):\n"
    "        x = x.detach().requires_grad_()\n        for _ in range(2):\n"
    "            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)\n"
    "        return x\n\n\n"
)
SYNCED = {  # a script for GPUs, which the CPU plays
    "nn.ReLU(), nn.Dropout(0.1)": "nn.SyncBatchNorm(16)",
    "nn.Linear(16, 3))": "nn.Linear(16, 3)).cuda()",
    "    model.eval()\n": "",
}
CODES = (
    "class Codes(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.register_buffer('codes', torch.zeros(16))\n\n    def forward(self, x):\n"
    "        self.codes.lerp_(x.detach().mean(0), 0.1)\n        return x\n\n\n"
)
TENSOR_PARALLEL = (
    "torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
)
FSDP = "for layer in (model[0], model[2], model):\n    fully_shard(layer, mesh=mesh)\n"
NOISY_STREAM = {
    "yield row, ": "yield row + 0.1 * torch.randn(5), ",
    "torch.manual_seed(0)\nmodel": "torch.manual_seed(rank)\nmodel",
}
OWN_GENERATOR = {
    "    def __len__": (
        "    def __init__(self):\n        self.chance = torch.Generator().manual_seed(0)\n\n"
        "    def __len__"
    ),
    "torch.randn(5)": "torch.randn(5, generator=self.chance)",
}
SEEDED = {
    "    epoch = 0\n": (
        "    epoch = 0\n\n    def __init__(self):\n        self.chance = torch.Generator()\n"
    ),
    "torch.Generator().manual_seed(self.epoch)": "self.chance.manual_seed(self.epoch)",
}
BFLOAT16 = {
    "nn.Linear(16, 3))\n": "nn.Linear(16, 3)).bfloat16()\n",
    "model(rows)": "model(rows.bfloat16())",
    "replica(inputs)": "replica(inputs.bfloat16()).float()",
}
UNSCALE = "        scaler.unscale_(optimizer)\n"
UPDATE = "        scaler.step(optimizer)\n        scaler.update()\n"
UNSCALED = "        for p in model.parameters():\n            p.grad /= 1024\n"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
BY_HAND = {  # a loss scale without a GradScaler
    "scaler.scale(loss)": "(1024 * loss)",
    UNSCALE: UNSCALED,
    UPDATE: "        optimizer.step()\n",
}
DIVIDED = CLIP + UNSCALED
OWN_SGD = """class MasterSGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr, **others):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"], self.state[p])

    def update(self, p, lr, state):
"""
MASTER_SGD = OWN_SGD + (
    "        master = state.setdefault('master', p.float())\n"
    "        p.copy_(master.sub_(lr * p.grad.float()))\n\n\ndef make_data"
)
RANDOM_SGD = OWN_SGD.replace("Master", "Random") + (
    "        fine = p.float() - lr * p.grad.float()\n"
    "        chance = torch.Generator().manual_seed(len(state))\n"
    "        state[len(state)] = 0\n"
    "        some = torch.randint(2**16, p.shape, generator=chance, dtype=torch.int32)\n"
    "        p.copy_(((fine.view(torch.int32) + some) & -(2**16)).view(torch.float32))\n"
    "\n\ndef make_data"
)
MASTERS = {  # float32 copies, which are updated
    "nn.Linear(8, 1))\n": "nn.Linear(8, 1)).bfloat16()\n",
    "optimizer = torch.optim.AdamW(model.parameters()": (
        "masters = [p.detach().float().requires_grad_() for p in model.parameters()]\n"
        "optimizer = torch.optim.AdamW(masters"
    ),
    "model(inputs)": "model(inputs.bfloat16()).float()",
    "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n": (
        "        for master, p in zip(masters, model.parameters(), strict=True):\n"
        "            master.grad = p.grad.float()\n            p.grad = None\n"
        "        optimizer.step()\n"
        "        for master, p in zip(masters, model.parameters(), strict=True):\n"
        "            p.data.copy_(master.data)\n"
    ),
}
PADDED = "Subset(data, list(DistributedSampler(data, shuffle=False)))"

FAULTS = {
    # --- Rows ---
    "no sampler": (
        D,
        {SAMPLER: "DataLoader(data, 8, shuffle=True)"} | NO_EPOCH,
        "all rows on each rank",
        WRONG,
        "DataLoader(data",
    ),
    "no sampler, one seed": (
        D,
        {SAMPLER: "DataLoader(data, 8, shuffle=True)", "manual_seed(rank)": "manual_seed(0)"}
        | NO_EPOCH,
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "no sampler, not shuffled": (
        D,
        {SAMPLER: "DataLoader(data, 8)"} | NO_EPOCH,
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "no sampler, with shards": (
        F,
        {SAMPLER: "DataLoader(data, 8)"} | NO_EPOCH,
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "sampler of one replica": (
        D,
        {"DistributedSampler(data)": "DistributedSampler(data, num_replicas=1, rank=0)"},
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "every rank says it is rank 0": (
        D,
        {"DistributedSampler(data)": "DistributedSampler(data, num_replicas=2, rank=0)"},
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "a sampler seed for each rank": (
        D,
        {"DistributedSampler(data)": "DistributedSampler(data, seed=rank)"},
        "rows twice",
        WRONG,
        "DataLoader(data",
    ),
    "no set_epoch": (D, NO_EPOCH, "order repeats", NOT_MEANT, "DataLoader(data"),
    "no set_epoch, by hand": (H, NO_EPOCH, "order repeats", NOT_MEANT, "DataLoader(data"),
    "set_epoch once": (
        D,
        {"sampler.set_epoch(epoch)": "sampler.set_epoch(1)"},
        "order repeats",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "not shuffled": (
        D,
        {"DistributedSampler(data)": "DistributedSampler(data, shuffle=False)"},
        "not shuffled",
        TO_KNOW,
        "DataLoader(data",
    ),
    "drop_last": (
        D,
        {SAMPLER: "DataLoader(data, 8, sampler=sampler, drop_last=True)"},
        "rows left out",
        TO_KNOW,
        "DataLoader(data",
    ),
    "data of its own": (
        D,
        {"make_data(0)": "make_data(rank)"},
        "other data",
        WRONG,
        "DataLoader(d",
    ),
    "a split of its own": (
        D,
        {
            "Subset(data, range(83)), Subset(data, range(83, 120))": (
                "torch.utils.data.random_split(data, [83, 37])"
            )
        },
        "other data",
        WRONG,
        "DataLoader(data, 8, sampler",
    ),
    "labels of its own": (
        D,
        {
            "data, tests = make_data(0)": (
                "data, tests = make_data(0)\n    data.dataset.tensors = "
                "(data.dataset.tensors[0], (data.dataset.tensors[1] + rank) % 3)"
            )
        },
        "other data",
        WRONG,
        "DataLoader(data",
    ),
    "random data without a seed": (
        H,
        {"torch.manual_seed(0)": "torch.manual_seed(rank)"},
        "other data",
        WRONG,
        "DataLoader(data",
    ),
    "uneven rows": (
        D,
        {SAMPLER: "DataLoader(Subset(data, range(rank, 83, 2)), 8, shuffle=True)"} | NO_EPOCH,
        "uneven rows",
        TO_KNOW,
        "DataLoader(Subset",
    ),
    "an epoch left early": (
        D,
        {"schedule.step()": "schedule.step()\n            if epoch == 0:\n                break"},
        "epoch left early",
        TO_KNOW,
        "DataLoader(data",
    ),
    "a stream not split by rank": (
        S,
        {"rank * worker.num_workers + worker.id, world_size *": "worker.id,"},
        "same rows",
        WRONG,
        "DataLoader(data",
    ),
    "a stream not split by worker": (
        S,
        {
            "rank * worker.num_workers + worker.id, world_size * worker.num_workers": (
                "rank, world_size"
            )
        },
        "workers repeat rows",
        WRONG,
        "DataLoader(data",
    ),
    "a stream with noise, not split by rank": (
        S,
        NOISY_STREAM | {"rank * worker.num_workers + worker.id, world_size *": "worker.id,"},
        "same rows",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "a stream with noise, not split by worker": (
        S,
        NOISY_STREAM
        | {
            "rank * worker.num_workers + worker.id, world_size * worker.num_workers": (
                "rank, world_size"
            )
        },
        "workers repeat rows",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "parts of a stream overlap": (
        S,
        {"rank * worker.num_workers + worker.id": "rank + worker.id"},
        "rows twice",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "workers that stay never see the epoch": (
        S,
        {"num_workers=2": "num_workers=2, persistent_workers=True"},
        "order repeats",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "an epoch in a tensor that is not shared": (
        S,
        {
            "    epoch = 0\n": "    def __init__(self):\n        self.epoch = torch.zeros(1)\n",
            "self.epoch)": "int(self.epoch))",
            "data.epoch = epoch": "data.epoch.fill_(epoch)",
            "num_workers=2": "num_workers=2, persistent_workers=True",
        },
        "order repeats",
        NOT_MEANT,
        "DataLoader(data",
    ),
    "a stream in one order": (
        S,
        {"data.epoch = epoch": "pass"},
        "not shuffled",
        TO_KNOW,
        "DataLoader(data",
    ),
    "a stream tested in parts that overlap": (
        S,
        {
            "epoch = 0": "epoch = fewer = 0",
            "part::parts]": "part :: parts - self.fewer]",
            END: "data.fewer = 1\nmodel.eval()\nwith torch.no_grad():\n"
            "    for inputs, _ in DataLoader(data, 4, num_workers=2):\n        model(inputs)\n"
            "dist.all_reduce(torch.ones(2))\n" + END,
        },
        "rows tested twice",
        NOT_MEANT,
        "in DataLoader(data",
    ),
    # --- Gradients ---
    "no DDP": (
        D,
        {
            "DistributedDataParallel(model)": "model",
            "contextlib.nullcontext() if last else replica.no_sync()": "contextlib.nullcontext()",
            REDUCE: "",
            "    dist.barrier()\n": "",
        },
        "no exchange",
        WRONG,
        "loss.backward",
    ),
    "past DDP": (D, {"replica(inputs)": "model(inputs)"}, "past DDP", WRONG, "model(inputs)"),
    "no_sync to the end": (
        D,
        {"last = number == len(parts)": "last = False"},
        "no_sync",
        WRONG,
        "loss.backward",
    ),
    "only the first part is sent": (
        D,
        {"last = number == len(parts)": "last = number == 1"},
        "no_sync",
        WRONG,
        "loss.backward",
    ),
    "a gradient changed on one rank": (
        D,
        {STEP: "            if rank == 1: model[0].weight.grad.mul_(1.1)\n" + STEP},
        "gradients differ",
        WRONG,
        "optimizer.step",
    ),
    "clipped by each rank's loss": (
        D,
        {STEP: "            nn.utils.clip_grad_norm_(model.parameters(), float(loss))\n" + STEP},
        "gradients differ",
        WRONG,
        "optimizer.step",
    ),
    "the sum, not the mean": (H, {SUM: ""}, "sum of gradients", NOT_MEANT, "optimizer.step"),
    "one gradient stays": (
        H,
        {
            "for parameter in model.parameters():\n            dist.all": (
                "for parameter in list(model.parameters())[:-1]:\n            dist.all"
            )
        },
        "no exchange",
        NOT_MEANT,
        "loss.backward",
    ),
    "nothing is averaged, by hand": (
        H,
        {"            dist.all_reduce(parameter.grad)\n" + SUM: "            pass\n"},
        "no exchange",
        NOT_MEANT,
        "loss.backward",
    ),
    "one rank weighs more": (
        H,
        {
            "        loss.backward()\n": "        (loss * (1 + rank)).backward()\n"
            "        for parameter in model.parameters():\n"
            "            parameter.grad.mul_(1 - 0.5 * rank)\n",
            "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad.mul_(1.5 - rank))",
        },
        "not the mean",
        TO_KNOW,
        "optimizer.step",
    ),
    "clipped before the average": (
        H,
        {
            "        loss.backward()\n": "        loss.backward()\n"
            "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        },
        "clipped too early",
        NOT_MEANT,
        "clip_grad_norm_",
    ),
    "no zero_grad": (
        D,
        {"optimizer.zero_grad()": "pass"},
        "gradients pile up",
        NOT_MEANT,
        "optimizer.step",
    ),
    "no zero_grad, by hand": (
        H,
        {"optimizer.zero_grad()": "pass"},
        "gradients pile up",
        NOT_MEANT,
        "optimizer.step",
    ),
    "a block in two reentrant checkpoints": (
        D,
        {
            "def make_data": TWICE + "def make_data",
            "nn.Linear(6, 16)": "Twice(nn.Linear(6, 6)), nn.Linear(6, 16)",
            "import torch\n": "import torch\nimport torch.utils.checkpoint\n",
        },
        "gradients differ",
        WRONG,
        "optimizer.step",
    ),
    # --- Replicas ---
    "a layer swapped after wrapping": (
        D,
        {
            "DistributedDataParallel(model)": (
                "DistributedDataParallel(model, find_unused_parameters=True)\n"
                "    model[3] = nn.Linear(16, 3)"
            ),
            "contextlib.nullcontext() if last else replica.no_sync()": "contextlib.nullcontext()",
            "rows.chunk(2), labels.chunk(2)": ONE_PART,
        },
        "replaced after wrapping",
        WRONG,
        "replica(inputs)",
    ),
    "init_sync off": (
        D,
        {"DistributedDataParallel(model)": "DistributedDataParallel(model, init_sync=False)"},
        "replicas start apart",
        WRONG,
        "DistributedDataParallel(",
    ),
    "not sent at the start": (
        H,
        {
            "for parameter in model.parameters():\n    dist.broadcast(parameter.data, 0)": (
                "with torch.no_grad():\n    model[0].weight += rank"
            )
        },
        "replicas start apart",
        WRONG,
        "optimizer.step",
    ),
    "loaded on rank 0 only": (
        D,
        {"    optimizer = torch": HALF},
        "replicas differ",
        WRONG,
        "optimizer.step",
    ),
    "the optimizer's state loaded on rank 0 only": (
        D,
        {
            "    schedule = torch": (
                "    if rank == 0:\n        averages = optimizer.state[model[0].weight]\n"
                "        averages['momentum_buffer'] = torch.ones(16, 6)\n    schedule = torch"
            )
        },
        "optimizer states differ",
        WRONG,
        "optimizer.step",
    ),
    "one rank skips an update": (
        D,
        {STEP: SKIP + "            schedule"},
        "unequal updates",
        NOT_MEANT,
        "optimizer.step",
    ),
    "changed by something else": (
        D,
        {"schedule.step()": "schedule.step(); model[0].bias.data += 1e-4 * rank * epoch"},
        "replicas differ",
        WRONG,
        "optimizer.step",
    ),
    "changed after the last update": (
        D,
        {
            "    if rank == 0:\n        torch.save": (
                "    model[0].bias.data += rank\n    if rank == 0:\n        torch.save"
            )
        },
        "replicas differ",
        WRONG,
        "optimizer.step",
    ),
    "a learning rate for each rank": (
        D,
        {"lr=0.1": "lr=0.1 * (1 + rank)"},
        "settings differ",
        WRONG,
        "SGD(",
    ),
    "a schedule on rank 0": (
        D,
        {"            schedule.step()": "            rank or schedule.step()"},
        "settings differ",
        WRONG,
        "SGD(",
    ),
    "a learning rate for each rank, and nothing is averaged": (
        H,
        {
            "lr=0.01)": "lr=0.01 * (1 + rank))",
            "            dist.all_reduce(parameter.grad)\n" + SUM: "            pass\n",
        },
        "settings differ",
        WRONG,
        "AdamW(",
    ),
    "a weight decay on rank 1": (
        H,
        {"lr=0.01)": "lr=0.01, weight_decay=0.1 * rank)"},
        "settings differ",
        WRONG,
        "AdamW(",
    ),
    # --- What is trained ---
    "a parameter left out": (
        D,
        {"SGD(model.parameters()": "SGD(list(model.parameters())[:-1]"},
        "in no optimizer",
        NOT_MEANT,
        "SGD(",
    ),
    "an optimizer made before sharding": (
        F,
        {
            "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n": "",
            "for layer in (": (
                "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\nfor layer in ("
            ),
        },
        "no gradient at all",
        WRONG,
        "optimizer.step",
    ),
    "a loss of one class": (
        D,
        {
            "cross_entropy(replica(inputs), wanted": (
                "cross_entropy(replica(inputs).sum(1, keepdim=True), 0 * wanted"
            )
        },
        "no gradient at all",
        WRONG,
        "optimizer.step",
    ),
    "a layer that is not used": (
        D,
        {
            "nn.Linear(16, 3))\n": "nn.Linear(16, 3))\n    model.spare = nn.Linear(1, 1)\n"
            "    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))\n",
            "DistributedDataParallel(model)": (
                "DistributedDataParallel(model, find_unused_parameters=True)"
            ),
        },
        "never a gradient",
        NOT_MEANT,
        "optimizer.step",
    ),
    "a learning rate of zero": (
        D,
        {"lr=0.1": "lr=0.0"},
        "never changes",
        NOT_MEANT,
        "optimizer.step",
    ),
    # --- 16 bits ---
    "weights in bfloat16, small updates": (
        D,
        BFLOAT16 | {"lr=0.1": "lr=1e-4"},
        "updates lost",
        NOT_MEANT,
        "optimizer.step",
    ),
    "clipped before the scaler divides": (
        P,
        {UNSCALE: ""},
        "clipped while scaled",
        NOT_MEANT,
        "clip_grad_norm_",
    ),
    "clipped before a division by hand": (
        P,
        BY_HAND | {UNSCALE: "", DIVIDED.partition("\n")[0] + "\n": DIVIDED},
        "clipped while scaled",
        NOT_MEANT,
        "clip_grad_norm_",
    ),
    "a scaler that does not make the update": (
        P,
        {UNSCALE: "", UPDATE: "        optimizer.step()\n"},
        "still scaled",
        NOT_MEANT,
        "optimizer.step",
    ),
    "float16 without a scaler, small gradients": (
        P,
        {
            "init_scale=1024.0": "enabled=False",
            "loss = nn": "loss = 1e-6 * nn",
            "clip_grad_norm_(model.parameters(), 1.0)": "clip_grad_norm_(model.parameters(), 1e-7)",
        },
        "lost in float16",
        NOT_MEANT,
        "scaler.step",
    ),
    "a sum that is too large for float16": (
        H,
        {
            "            dist.all_reduce(parameter.grad)\n": (
                "            half = (4000 * parameter.grad).half()\n"
                "            dist.all_reduce(half)\n"
                "            parameter.grad = half.float() / 4000\n"
            )
        },
        "inf or nan",
        WRONG,
        "optimizer.step",
    ),
    "inf, and nobody looks": (
        P,
        BY_HAND | {"randn(64, 5)\n": "randn(64, 5)\nrows[9] = 1e5\n"},
        "inf or nan",
        WRONG,
        "optimizer.step",
    ),
    "each rank decides by itself whether to skip": (
        D,
        {STEP: SKIP.replace("epoch == 0", "epoch == 1") + "            schedule"},
        "skipped alone",
        WRONG,
        "optimizer.step",
    ),
    "each rank decides for its share of the weights": (
        H,
        {
            "AdamW(model.parameters()": "AdamW([*model.parameters()][2 * rank : 2 * rank + 2]",
            "        optimizer.step()\n": "        if rank == 0 or epoch != 1:\n"
            "            optimizer.step()\n"
            "        for number, parameter in enumerate(model.parameters()):\n"
            "            dist.broadcast(parameter.data, number // 2)\n",
        },
        "skipped alone",
        NOT_MEANT,
        "optimizer.step",
    ),
    # --- Modes and buffers ---
    "BatchNorm, buffers sent": (
        D,
        {"nn.Dropout(0.1)": "nn.BatchNorm1d(16)", "rows.chunk(2), labels.chunk(2)": ONE_PART},
        "buffers differ",
        TO_KNOW,
        "DistributedDataParallel(",
    ),
    "a codebook of each rank's own": (
        D,
        {"def make_data": CODES + "def make_data", "nn.Dropout(0.1)": "Codes()"},
        "buffers of one's own",
        NOT_MEANT,
        "DistributedDataParallel(",
    ),
    "BatchNorm, not sent": (
        D,
        {
            "nn.Dropout(0.1)": "nn.BatchNorm1d(16)",
            "rows.chunk(2), labels.chunk(2)": ONE_PART,
            "DistributedDataParallel(model)": (
                "DistributedDataParallel(model, broadcast_buffers=False)"
            ),
        },
        "buffers differ",
        NOT_MEANT,
        "DistributedDataParallel(",
    ),
    "train() forgotten": (
        D,
        {"    model.train()\n": ""},
        "trains in eval mode",
        NOT_MEANT,
        "optimizer.step",
    ),
    "eval() forgotten, with SyncBatchNorm": (
        D,
        SYNCED,
        "tests in train mode",
        NOT_MEANT,
        "model(rows)",
    ),
    "eval() forgotten": (
        D,
        {"    model.eval()\n": ""},
        "tests in train mode",
        NOT_MEANT,
        "model(rows)",
    ),
    # --- Evaluation, output, random numbers ---
    "an evaluation that fills up": (
        D,
        {"Subset(data, range(rank, len(data), world_size))": PADDED},
        "rows tested twice",
        NOT_MEANT,
        "DataLoader(mine",
    ),
    "an evaluation with a sampler": (
        D,
        {
            "DataLoader(mine, 8)": (
                "DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))"
            )
        },
        "rows tested twice",
        NOT_MEANT,
        "DataLoader(data, 8, sampler=D",
    ),
    "counts stay at home": (D, {REDUCE: ""}, "counts stay at home", NOT_MEANT, "DataLoader(mine"),
    "counts stay at home, and SyncBatchNorm sends": (
        D,
        SYNCED | {REDUCE: ""},
        "counts stay at home",
        NOT_MEANT,
        "DataLoader(mine",
    ),
    "both ranks save": (
        D,
        {"    if rank == 0:\n        torch.save": "    if True:\n        torch.save"},
        "one file, several writers",
        NOT_MEANT,
        "torch.save",
    ),
    "both ranks write for TensorBoard": (
        D,
        {WRITER: BOARD.replace("FOLDER", "path")},
        "several boards",
        NOT_MEANT,
        "SummaryWriter(path",
    ),
    "module. in the names": (
        D,
        {"torch.save(model": "torch.save(replica"},
        "module. in names",
        TO_KNOW,
        "torch.save",
    ),
    "all print": (
        D,
        {"        if rank == 0:\n            print(": "        if True:\n            print("},
        "printed by several ranks",
        TO_KNOW,
        "print(",
    ),
    "the same dropout masks": (
        D,
        {"torch.manual_seed(rank)": "torch.manual_seed(0)"},
        "same random numbers",
        TO_KNOW,
        "replica(inputs)",
    ),
    "the same noise on all ranks": (
        N,
        {"torch.manual_seed(rank)": "torch.manual_seed(0)"},
        "same random numbers",
        NOT_MEANT,
        "DataLoader(Noisy",
    ),
    "a generator of the data set's own, alike on all ranks": (
        N,
        OWN_GENERATOR,
        "same random numbers",
        NOT_MEANT,
        "DataLoader(Noisy",
    ),
    "a generator of the data set's own, alike in all workers": (
        N,
        {text: other.replace("seed(0)", "seed(rank)") for text, other in OWN_GENERATOR.items()},
        "same random numbers",
        NOT_MEANT,
        "DataLoader(Noisy",
    ),
    # --- Memory ---
    "a rank has a larger optimizer": (
        H,
        {
            "torch.optim.AdamW(model.parameters(), lr=0.01)": (
                "(torch.optim.SGD if rank else torch.optim.AdamW)(model.parameters(), lr=0.01)"
            )
        },
        "memory differs",
        TO_KNOW,
        "optimizer.step",
    ),
    "states that are not sharded": (
        F,
        {
            "AdamW(model.parameters(), lr=0.01)\n": (
                "AdamW(model.parameters(), lr=0.01)\nfor p in model.parameters():\n"
                '    optimizer.state[p]["smooth"] = torch.zeros(p.shape)\n'
            ),
            "torch.optim.AdamW": "torch.optim.SGD",
        },
        "whole beside shards",
        TO_KNOW,
        "optimizer.step",
    ),
    "a layer that is not sharded": (
        F,
        {"for layer in (model[0], model[2], model):": "for layer in (model[2],):"},
        "left out of sharding",
        NOT_MEANT,
        "optimizer.step",
    ),
    # --- Messages ---
    "two messages swapped": (D, {REDUCE: SWAPPED}, "messages differ", NOT_MEANT, ""),
    "one rank sends another shape": (
        D,
        {
            REDUCE: REDUCE + "    dist.all_reduce(torch.ones(2 - 0 * rank)) if rank else "
            "dist.broadcast(torch.ones(2), 0)\n"
        },
        "messages differ|hang",
        WRONG,
        "",
    ),
    "only rank 0 meets": (
        D,
        {
            "        if rank == 0:\n            print(": (
                "        if rank == 0:\n            dist.barrier()\n            print("
            )
        },
        "hang|messages differ",
        WRONG,
        "",
    ),
    "a rank has more batches": (
        D,
        {"in loader:": "in list(loader)[rank:]:", REDUCE: ""},
        "hang|messages differ",
        WRONG,
        "",
    ),
    "rank 1 ends after fewer calls of one line": (
        H,
        {END: "for batch in range(3 - rank):\n    dist.barrier()  # per batch\n" + END},
        "messages differ",
        WRONG,
        "# per batch",
    ),
    "rank 1 alone calls a helper once more": (
        H,
        {END: "def mean(x):\n    dist.all_reduce(x)\n\n\n" + ONCE_MORE},
        "messages differ",
        NOT_MEANT,
        "mean(2 * last)",
    ),
    "rank 1 leaves a call of a helper out once": (
        H,
        {
            END: "def mean(x):\n    dist.all_reduce(x)\n\n\nlast = torch.ones(1)\n"
            "for step in range(3):\n    mean(last)\n    if rank == 0 or step != 1:\n"
            "        mean(2 * last)\n" + END
        },
        "messages differ",
        NOT_MEANT,
        "mean(2 * last)",
    ),
    "rank 1 alone computes a statistic of all ranks": (
        H,
        {
            "import torch.distributed as dist": "import torch.distributed as dist\n"
            "import torch.distributed.nn",
            END: "mean = dist.nn.all_reduce\n" + ONCE_MORE,
        },
        "hang",
        WRONG,
        "mean(2 * last)",
    ),
    # --- The group ---
    "a world of its own": (
        D,
        {
            'init_process_group("gloo")': (
                'init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
            ),
        },
        "another world",
        WRONG,
        "init_process_group",
    ),
    "no group": (
        N,
        {
            'dist.init_process_group("gloo")\nrank, world_size = dist.get_rank(), '
            "dist.get_world_size()": "rank, world_size = 0, 2",
            "DistributedSampler(Noisy())": "DistributedSampler(Noisy(), 2, rank)",
            "DistributedDataParallel(nn.Linear(5, 1))": "nn.Linear(5, 1)",
            "dist.destroy_process_group()": "pass",
        },
        "no group",
        WRONG,
        "",
    ),
}

# Right ways to train, each an edit of a clean script: nothing may be called wrong.
# A third element is a kind that must not be named at all.
CLEAN = {
    "as they are: DDP": (D, {}),
    "as they are: by hand": (H, {}),
    "as they are: a stream": (S, {}),
    "as they are: noise": (N, {}),
    "as they are: a stream whose workers stay, and see the epoch": (
        S,
        {
            "epoch = 0": "epoch = torch.zeros(1, dtype=torch.int64).share_memory_()",
            "self.epoch)": "int(self.epoch))",
            "data.epoch = epoch": "data.epoch.fill_(epoch)",
            "num_workers=2": "num_workers=2, persistent_workers=True",
        },
    ),
    "as they are: a stream with noise": (S, NOISY_STREAM),
    "a stream with equal rows": (
        S,
        {"        order =": "        rows[32:] = rows[:32]\n        order ="},
        "rows twice",
    ),
    "a stream whose labels number the rows of each part": (
        S,
        {
            "for row in rows[": "for number, row in enumerate(rows[",
            "part::parts]]": "part::parts]])",
            "yield row, row.sum(0, keepdim=True)": "yield row, torch.tensor([float(number)])",
        },
    ),
    "two forwards of each batch of a stream": (
        S,
        {"model(inputs), targets)": "model(inputs) + model(inputs), targets)"},
        "workers repeat rows",
    ),
    "a stream that gives each row twice": (
        S,
        {"    yield row, row.sum(0, keepdim=True)": "    yield from [(row, row[:1])] * 2"},
        "workers repeat rows",
    ),
    "a stream of two views of each row": (
        S,
        {
            "    yield row, ": "    for _ in range(2):\n                yield torch.randn(5), ",
            "torch.manual_seed(0)\nmodel": "torch.manual_seed(rank)\nmodel",
        },
        "workers repeat rows",
    ),
    "a stream tested with two forwards of each batch": (
        S,
        {
            END: "model.eval()\nwith torch.no_grad():\n"
            "    for inputs, _ in DataLoader(data, 4, num_workers=2):\n"
            "        model(inputs) + model.module(inputs)\n"
            "dist.all_reduce(torch.ones(2))\n" + END,
        },
        "rows tested twice",
    ),
    "a generator of its own for the order": (S, SEEDED, "same random numbers"),
    "a generator of its own, seeded for each row": (
        S,
        SEEDED
        | {
            "for row in rows[order[part::parts]]:\n": (
                "for number in order[part::parts].tolist():\n"
                "            self.chance.manual_seed(64 * self.epoch + number)\n"
                "            row = rows[number] + torch.randn(5, generator=self.chance)\n"
            )
        },
        "same random numbers",
    ),
    "attributes that can't be asked": (
        N,
        {
            "class Noisy": "import random\n\n\nclass Noisy",
            "    def __len__": (
                "    def __init__(self):\n        self.chance = random.SystemRandom()\n"
                "        self.shape = torch.zeros(2, device='meta')\n"
                "        self.few = torch.eye(2).to_sparse()\n\n    def __len__"
            ),
        },
    ),
    "a generator that each worker makes": (
        N,
        {
            "        row = self.rows": (
                "        if not hasattr(self, 'chance'):\n            self.chance = "
                "torch.Generator().manual_seed(torch.initial_seed())\n        row = self.rows"
            ),
            "torch.randn(5)": "torch.randn(5, generator=self.chance)",
        },
        "same random numbers",
    ),
    "as they are: shards": (F, {}),
    "as they are: half precision": (P, {}),
    "as they are: a loss scale by hand": (P, BY_HAND),
    "as they are: a row beyond float16, which all skip": (
        P,
        {"randn(64, 5)\n": "randn(64, 5)\nrows[9] = 1e5\n"},
    ),
    "as they are: a row beyond float16, which the fused update skips": (
        P,
        {"randn(64, 5)\n": "randn(64, 5)\nrows[9] = 1e5\n", "lr=0.05": "lr=0.05, fused=True"},
    ),
    "as they are: a scaler and a fused update": (
        P,
        {UNSCALE: "", CLIP: "", "0.05": "0.05, fused=True"},
    ),
    "as they are: a scaler whose gradients are divided by hand": (
        P,
        {
            UNSCALE: UNSCALED.replace("1024", "scaler.get_scale()"),
            UPDATE: "        optimizer.step()\n",
        },
    ),
    "as they are: clipped to a limit with the factor in it": (
        P,
        {UNSCALE: "", "parameters(), 1.0)": "parameters(), scaler.get_scale())"},
    ),
    "as they are: one scaler, two losses, two optimizers": (
        P,
        {
            "scaler = ": "head = DistributedDataParallel(nn.Linear(5, 1))\n"
            "other = torch.optim.SGD(head.parameters(), lr=0.05)\nscaler = ",
            "optimizer.zero_grad()": "optimizer.zero_grad(), other.zero_grad()",
            UPDATE: '        with torch.autocast("cpu", torch.float16):\n'
            "            outputs = head(inputs)\n"
            "        loss = nn.functional.mse_loss(outputs.float(), targets)\n"
            "        scaler.scale(loss).backward()\n        scaler.unscale_(other)\n"
            "        scaler.step(optimizer), scaler.step(other)\n        scaler.update()\n",
        },
    ),
    "a finer copy of each weight inside of the optimizer": (
        D,
        BFLOAT16
        | {"def make_data": MASTER_SGD, "torch.optim.SGD": "MasterSGD", "lr=0.1": "lr=1e-4"},
        "updates lost",
    ),
    "an optimizer that rounds at random": (
        D,
        BFLOAT16
        | {"def make_data": RANDOM_SGD, "torch.optim.SGD": "RandomSGD", "lr=0.1": "lr=1e-3"},
        "replicas differ",
    ),
    "a rank that needs more passes for some updates": (
        D,
        {
            "rows.chunk(2), labels.chunk(2)": (
                "rows.chunk(parts := 1 + (rank * 8 < rows.sum())), labels.chunk(parts)"
            )
        },
        "skipped alone",
    ),
    "rank 0 draws what its model looks at": (
        D,
        {
            STEP: STEP.replace(
                "            schedule",
                "            if rank == 0 and len(rows) < 8:\n"
                "                model.requires_grad_(False)\n"
                "                for _ in range(2):\n"
                "                    model(rows.requires_grad_()).sum().backward()\n"
                "                model.requires_grad_(True)\n            schedule",
            )
        },
        "skipped alone",
    ),
    "weights in bfloat16, large updates": (D, BFLOAT16 | {"lr=0.1": "lr=1.0"}, "updates lost"),
    "float32 copies of bfloat16 weights": (H, MASTERS, "updates lost|in no optimizer"),
    "more micro-batches on one rank": (
        D,
        {"rows.chunk(2), labels.chunk(2)": "rows.chunk(1 + rank), labels.chunk(1 + rank)"},
        "skipped alone",
    ),
    "as they are: a board on rank 0": (
        D,
        {
            WRITER: WRITER
            + "    if rank == 0:\n    "
            + BOARD.replace("FOLDER", "path").removesuffix(WRITER).replace("\n    ", "\n        ")
        },
    ),
    "as they are: a board for each rank": (
        D,
        {WRITER: BOARD.replace("FOLDER", "os.path.join(path, str(rank))")},
    ),
    "as they are: shards, and a layer averaged by hand": (
        F,
        {
            "for layer in (model[0], model[2], model):": "for layer in (model[2],):",
            "        optimizer.step()\n": "        for p in model[0].parameters():\n"
            "            dist.all_reduce(p.grad)\n"
            "            p.grad /= dist.get_world_size()\n        optimizer.step()\n",
        },
    ),
    "as they are: shards, and a layer of its own on each rank": (
        F,
        {
            "for layer in (model[0], model[2], model):": "for layer in (model[2],):",
            "optimizer = ": "for p in model[0].parameters():\n"
            "    nn.init.normal_(p, dist.get_rank())\noptimizer = ",
        },
    ),
    "frozen layers": (
        D,
        {
            "    replica = D": "    model[0].requires_grad_(False)\n    replica = D",
            "SGD(model.parameters()": "SGD((p for p in model.parameters() if p.requires_grad)",
        },
    ),
    "an expert on each rank": (
        D,
        {
            "    replica = D": (
                "    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(\n"
                '        model, ["0.weight", "0.bias"])\n    replica = D'
            )
        },
    ),
    "a part is trained later": (
        D,
        {
            "SGD(model.parameters()": "SGD(model[3].parameters()",
            "    schedule = ": (
                "    second = torch.optim.AdamW(model[0].parameters())\n    schedule = "
            ),
            "zero_grad()": "zero_grad(), second.zero_grad()",
            "optimizer.step()": "optimizer.step(), second.step()",
            "nn.ReLU()": "Detached()",
            "def make_data": (
                "class Detached(nn.Module):\n    def forward(self, x):\n"
                "        return 0 * x.relu() + x.detach().relu()\n\n\ndef make_data"
            ),
        },
    ),
    "a sampler without an end": (
        D,
        {
            "    loader = ": ("    sampler = Endless(data)\n    loader = "),
            "in loader:": "in itertools.islice(loader, 15):",
            "sampler.set_epoch(epoch)": "pass",
            "import contextlib": "import contextlib\nimport itertools",
            "def make_data": (
                "class Endless(torch.utils.data.Sampler):\n"
                "    def __init__(self, data):\n        self.data = data\n\n"
                "    def __iter__(self):\n"
                "        g = torch.Generator().manual_seed(0)\n"
                "        while True:\n"
                "            order = torch.randperm(len(self.data), generator=g).tolist()\n"
                "            yield from order[dist.get_rank() :: 2]\n\n\ndef make_data"
            ),
        },
    ),
    "an optimizer in shares": (
        D,
        {
            "import torch.distributed as dist": (
                "import torch.distributed as dist\n"
                "from torch.distributed.optim import ZeroRedundancyOptimizer"
            ),
            "torch.optim.SGD(model.parameters(), lr": (
                "ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr"
            ),
        },
    ),
    "two optimizers": (
        D,
        {
            "SGD(model.parameters()": "SGD(model[3].parameters()",
            "    schedule = ": (
                "    second = torch.optim.AdamW(model[0].parameters())\n    schedule = "
            ),
            "zero_grad()": "zero_grad(), second.zero_grad()",
            "optimizer.step()": "optimizer.step(), second.step()",
        },
    ),
    "a batch sampler": (
        D,
        {
            SAMPLER: "DataLoader(data, batch_sampler=torch.utils.data.BatchSampler("
            "sampler, 8, drop_last=False))"
        },
    ),
    "unequal rows, with join": (
        D,
        {
            SAMPLER: "DataLoader(Subset(data, range(rank, 83 - 9 * rank, 2)), 8, shuffle=True)",
            "sampler.set_epoch(epoch)": "joined = replica.join()",
            "        for rows, labels in loader:": (
                "        joined.__enter__()\n        for rows, labels in loader:"
            ),
            "        score =": "        joined.__exit__(None, None, None)\n        score =",
        },
    ),
    "noise from a generator of its own": (
        N,
        {
            "torch.manual_seed(rank)": "own = torch.Generator()\nown.seed()",
            "0.1 * torch.randn(5)": "0.1 * torch.randn(5, generator=own)",
            ", num_workers=2": "",
        },
        "other data",
    ),
    "a bias before BatchNorm": (
        D,
        {
            "nn.ReLU()": "nn.BatchNorm1d(16)",
            "lr=0.1": "lr=1e-3",
            SAMPLER: "DataLoader(data, 8, sampler=sampler, drop_last=True)",
        },
        "never changes",
    ),
    "a teacher that nobody trains, other on each rank": (
        D,
        {
            "    schedule = ": "    teacher = nn.Linear(6, 3)\n    schedule = ",
            "loss.backward()": "loss.backward(), teacher(inputs)",
        },
        "replicas differ",
    ),
    "an update that fails, before the training": (
        D,
        {
            "    schedule = ": (
                "    spare = torch.ones(1, requires_grad=True)\n"
                "    spare.sum().backward()\n"
                "    with contextlib.suppress(AssertionError):\n"
                "        torch.optim.AdamW([spare], capturable=True).step()\n    schedule = "
            )
        },
    ),
    "the address of another machine": (
        D,
        {
            "    dist.init_process_group(": (
                '    os.environ["MASTER_ADDR"] = "192.0.2.1"\n    dist.init_process_group('
            )
        },
    ),
    "a mesh makes the group": (
        F,
        {
            'dist.init_process_group("gloo")': 'mesh = dist.init_device_mesh("cpu", (2,))',
            'mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))': "pass",
        },
        "no group",
    ),
    "parts of each layer": (
        F,
        {
            "torch.distributed.fsdp import fully_shard": TENSOR_PARALLEL,
            FSDP: 'plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}\n'
            "parallelize_module(model, mesh, plan)\n",
            SAMPLER: "DataLoader(data, 8)",
        },
        "same rows",
    ),
    "GPUs: parts of each layer, in shards": (
        F,
        {
            "torch.distributed.fsdp import fully_shard": TENSOR_PARALLEL
            + "\nfrom torch.distributed.fsdp import fully_shard",
            'mesh("cpu", (dist.get_world_size(),))': (
                'mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("rows", "parts"))'
            ),
            "nn.ReLU()": "Heads()",
            "model = ": "class Heads(nn.Module):\n    def forward(self, x):\n"
            "        q = x.view(-1, 4, 1, 2)\n"
            "        q = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)\n"
            "        return q.reshape(-1, 8)\n\n\nmodel = ",
            FSDP: 'plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}\n'
            'parallelize_module(model, mesh["parts"], plan)\n'
            'fully_shard(model, mesh=mesh["rows"])\n',
            SAMPLER: "DataLoader(data, 8)",
        },
        "same rows",
    ),
    "GPUs: FullyShardedDataParallel": (
        F,
        {
            "import fully_shard": "import FullyShardedDataParallel",
            FSDP: "model = FullyShardedDataParallel(model.cuda())\n",
        },
        "no exchange|replicas.*",
    ),
    "an average of the weights": (
        D,
        {
            "    schedule = ": "    smooth = torch.optim.swa_utils.AveragedModel(model)\n"
            "    schedule = ",
            "schedule.step()": "schedule.step(), smooth.update_parameters(model)",
            "score = evaluate(model": "score = evaluate(smooth",
        },
    ),
    "each rank evaluates all rows": (
        D,
        {"Subset(data, range(rank, len(data), world_size))": "data", REDUCE: ""},
    ),
    "each rank evaluates all rows, in another order": (
        D,
        {
            "Subset(data, range(rank, len(data), world_size))": "data",
            "DataLoader(mine, 8)": "DataLoader(mine, 8, shuffle=True)",
            REDUCE: "",
        },
        "rows tested twice|counts stay at home",
    ),
    "rank 0 alone evaluates": (
        D,
        {
            "        score = evaluate(model, tests, rank, world_size)\n        if rank == 0:\n": (
                "        if rank == 0:\n            score = evaluate(model, tests, 0, 1)\n"
            ),
            REDUCE: "",
        },
    ),
    "mixed precision": (
        D,
        {
            "                    loss = cross": (
                '                    with torch.autocast("cpu", torch.bfloat16):\n'
                "                        out = replica(inputs)\n"
                "                    loss = cross"
            ),
            "cross_entropy(replica(inputs)": "cross_entropy(out.float()",
        },
    ),
    "clipped after the average": (
        D,
        {STEP: "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP},
    ),
    "a static graph": (
        D,
        {
            "DistributedDataParallel(model)": "DistributedDataParallel(model, static_graph=True)",
            "contextlib.nullcontext() if last else replica.no_sync()": "contextlib.nullcontext()",
            "rows.chunk(2), labels.chunk(2)": ONE_PART,
        },
    ),
    "main process first": (
        D,
        {
            "    data, tests = ": "    if rank > 0:\n        dist.barrier()\n    data, tests = ",
            "    sampler = D": "    if rank == 0:\n        dist.barrier()\n    sampler = D",
        },
    ),
    "gathered for rank 0": (
        D,
        {
            REDUCE: REDUCE + "    found = [None] * world_size if rank == 0 else None\n"
            "    dist.gather_object(rank, found, dst=0)\n"
        },
    ),
    "a group for each rank": (
        D,
        {
            "    data, tests = ": "    groups = [dist.new_group([r]) for r in range(world_size)]\n"
            "    dist.all_reduce(torch.ones(rank + 1), group=groups[rank])\n    data, tests = "
        },
    ),
    "halves of a model": (
        H,
        {
            "for parameter in model.parameters():\n    dist.broadcast(parameter.data, 0)": (
                "torch.nn.init.normal_(model[0].weight, rank)"
            ),
            SAMPLER: "DataLoader(data, 8)",
            "sampler.set_epoch(epoch)": "pass",
            "mse_loss(model(inputs), targets)": (
                "mse_loss(dist.nn.all_reduce(model(inputs)), targets)"
            ),
            "            dist.all_reduce(parameter.grad)\n" + SUM: "            pass\n",
            "import torch.distributed as dist": (
                "import torch.distributed as dist\nimport torch.distributed.nn"
            ),
        },
    ),
    "averaged now and then": (
        H,
        {
            "            dist.all_reduce(parameter.grad)\n" + SUM: "            pass\n",
            "        optimizer.step()\n": "        optimizer.step()\n"
            "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.data)\n"
            "            parameter.data /= world_size\n",
        },
    ),
    "rows drawn with replacement": (
        D,
        {
            SAMPLER: "DataLoader(data, 8, sampler=torch.utils.data.WeightedRandomSampler("
            "torch.ones(83), 40))",
            "sampler.set_epoch(epoch)": "pass",
        },
    ),
    "a file of rows for each rank": (
        D,
        {
            "make_data(0)": "make_data(rank)",
            SAMPLER: "DataLoader(data, 8, shuffle=True)",
            "sampler.set_epoch(epoch)": "pass",
        },
    ),
    "the loss of all ranks' rows, added up": (
        H,
        {
            "mse_loss(model(inputs), targets)": (
                'mse_loss(model(inputs), targets, reduction="sum") / (len(inputs) * world_size)'
            ),
            SUM: "",
        },
    ),
}
