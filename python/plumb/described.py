"""What the binding's classes are for, in words, with an example each."""

from . import _C

_C.World.__doc__ = """The ranks taking part: found by ``plumb.world()``, or ``World()`` for one rank alone.

    >>> import plumb
    >>> world = plumb.World()
    >>> world.rank, world.size
    (0, 1)
    """

_C.Mesh.__doc__ = """The axes that replication and sharding run over; 0: as many as the others leave.

    >>> import plumb
    >>> plumb.Mesh(replicate=2, shard=4).shard
    4
    """

_C.AdamW.__doc__ = """AdamW, fused over flat memory, with f32 masters of half-precision parameters.

    >>> import plumb
    >>> plumb.AdamW(lr=3e-4, weight_decay=0.1).betas
    (0.9, 0.999)
    """

_C.SGD.__doc__ = """SGD, fused over flat memory.

    >>> import plumb
    >>> plumb.SGD(lr=0.1, momentum=0.9, nesterov=True).momentum
    0.9
    """

_C.ParameterGroup.__doc__ = """Parameters of these names with a learning rate or a weight decay of their own.

    >>> import plumb, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> no_decay = plumb.ParameterGroup({"bias"}, weight_decay=0.0)
    >>> engine = plumb.Engine(model, plumb.AdamW(), groups=[no_decay])
    """

_C.Schedule.__doc__ = """A learning rate that rises for ``warmup`` steps, then falls as a cosine to ``floor`` of itself at ``total``.

    >>> import plumb
    >>> plumb.Schedule(warmup=10, total=100).factor(5) < 1.0
    True
    """

_C.LossScale.__doc__ = """Dynamic loss scaling, for f16.

    >>> import plumb, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> engine = plumb.Engine(model, plumb.SGD(), loss_scale=plumb.LossScale(1024.0))
    >>> engine.backward(model(torch.ones(1, 2)).sum())
    >>> engine.step().loss_scale
    1024.0
    """

_C.StepInfo.__doc__ = """What a step did: its number, the learning rates, whether it was skipped, the gradients' norm.

    >>> import plumb, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> engine = plumb.Engine(model, plumb.SGD(lr=0.1), clip_norm=1.0)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> info = engine.step()
    >>> info.step, info.lr, info.skipped, info.grad_norm
    (0, 0.1, False, tensor(6.9282))
    """

_C.LoadInfo.__doc__ = """What was loaded: the checkpoint's path, its step, how many samples it had seen, what did not fit.

    >>> import plumb, tempfile, torch
    >>> engine = plumb.Engine(torch.nn.Linear(2, 1), plumb.SGD(lr=0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = engine.save(folder, samples=32)
    ...     info = engine.load(folder)
    >>> info.step, info.samples, info.mismatches
    (0, 32, [])
    """

_C.Error.__doc__ = """What was found, what was expected, what to do; with the rank and the parameter's name.

    >>> import plumb, torch
    >>> try:
    ...     plumb.Engine(torch.nn.Linear(2, 1), strategy="zero9")
    ... except plumb.Error as error:
    ...     print(error)
    plumb: ...zero9...
    """

_C.SaveError.__doc__ = """A checkpoint could not be written; the engine and earlier checkpoints are as they were.

    >>> import os, plumb, torch
    >>> engine = plumb.Engine(torch.nn.Linear(2, 1), plumb.SGD(lr=0.1))
    >>> try:
    ...     engine.save(os.devnull)  # no folder
    ... except plumb.SaveError as error:
    ...     print(error)
    plumb: ...
    """
