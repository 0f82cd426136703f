"""When and with what ``save()`` and ``load()`` may be called: what is refused, what comes in between, what a step around them is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import plumb
from saved import Gives, seeded


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
        path = Path(engine.save(tmp_path))
        before = sorted(path.iterdir())
        with pytest.raises(plumb.SaveError, match="is a checkpoint itself; name the folder that it lies in"):
            engine.save(path)
        assert sorted(path.iterdir()) == before
        with pytest.raises(plumb.SaveError, match="lies in the checkpoint"):
            engine.save(path / "deeper")
        engine.load(path)
        (tmp_path / f"save-{2**63 - 1}-step-1").mkdir()
        assert Path(engine.save(tmp_path)).name == "save-00000002-step-0"  # that one is none of ours


def test_a_load_beside_an_optimizer_that_got_strangers_is_refused_on_every_rank(tmp_path: Path) -> None:
    def run() -> str:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plumb.Engine(model, optimizer)
        engine.save(tmp_path / "all")
        if engine.world.rank == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
        before = model.weight.detach().clone()
        with pytest.raises(plumb.Error) as caught:
            engine.load(tmp_path / "all")
        assert torch.equal(model.weight, before)
        engine.close()
        return str(caught.value)

    for said in plumb.spawn(run, 2, method="thread"):
        assert "failed on rank 1" in said and "of shape [4], is none of the engine's" in said


def test_arguments_that_are_none_are_refused_on_every_rank_in_words(tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "samples is 1.5; expected a whole number": {"samples": 1.5},
        "samples is None; expected a whole number": {"samples": None},
        f"samples is {2**63}; expected less than": {"samples": 2**63},
        "keep is 'x'; expected a whole number": {"keep": "x"},
        "extras is a list; expected a dict": {"extras": [Gives(1)]},
        "an extra is called 1; expected a name": {"extras": {1: Gives(1)}},
        "'int' object is not iterable": {"leave_out": 5},
        "expected str, bytes or os.PathLike object, not int": {"folder": 5},
    }

    def run() -> list[str]:
        said = []
        with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
            for words in wrong.values():
                given = {"folder": tmp_path / "all", **(words if engine.world.rank == 1 else {})}
                with pytest.raises(plumb.SaveError) as caught:
                    engine.save(given.pop("folder"), **given)
                said.append(str(caught.value))
            engine.save(tmp_path / "all", samples=numpy.int64(7), keep=torch.tensor(2))  # type: ignore[arg-type]
            assert engine.load(tmp_path / "all").samples == 7
        return said

    for rank in plumb.spawn(run, 2, method="thread"):
        for expected, said in zip(wrong, rank, strict=True):
            assert "failed on rank 1" in said and expected in said and len(said) < 300, said


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_of_two_loads_before_the_first_step_the_second_counts(tmp_path: Path, strategy: str) -> None:
    def run(loads: list[str]) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        engine = plumb.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), strategy=strategy)
        for path in loads:
            engine.load(path)
        for number in range(2):
            if not loads:
                engine.save(tmp_path / str(number))
            (model(torch.full((1, 3), 1.0 + engine.world.rank)).square()).sum().backward()
            engine.step()
            engine.zero_grad()
        whole: list[float] = model.weight.flatten().tolist()
        return whole

    undisturbed = plumb.spawn(run, 2, ([],))
    assert plumb.spawn(run, 2, ([str(tmp_path / "1"), str(tmp_path / "0")],)) == undisturbed


def test_what_is_wrong_with_a_load_on_one_rank_every_rank_hears(tmp_path: Path) -> None:
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "expected str, bytes or os.PathLike object, not int": ("load", {"path": 5}),
        "extras is a list; expected a dict": ("load", {"extras": [Gives(1)]}),
        "the path is 'a\\x00b', which is no name in UTF-8": ("load", {"path": "a\0b"}),
        "the path is '\\udcff', which is no name in UTF-8": ("load_weights", {"path": b"\xff"}),
        "object, not NoneType": ("load_weights", {"path": None}),
    }

    def run() -> list[str]:
        said = []
        with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
            engine.save(tmp_path / "all")
            for call, words in wrong.values():
                given = {"path": tmp_path / "all", **(words if engine.world.rank == 1 else {})}
                with pytest.raises(plumb.Error) as caught:
                    getattr(engine, call)(given.pop("path"), **given)
                said.append(str(caught.value))
            engine.load(tmp_path / "all")
            with pytest.raises(plumb.SaveError, match="the folder is '.udcff', which is no name in UTF-8"):
                engine.save(b"\xff")  # type: ignore[arg-type]
            if engine.world.rank == 0:
                with pytest.raises(plumb.Error, match="rank 1 called save\\(\\) where rank 0 called load_weights\\(\\); every rank must call the same"):
                    engine.load_weights(tmp_path / "all")
            else:
                with pytest.raises(plumb.SaveError, match="rank 0 called load_weights\\(\\) where rank 1 called save"):
                    engine.save(tmp_path / "all")
            engine.save(tmp_path / "all")
        return said

    for rank in plumb.spawn(run, 2, method="thread"):
        for expected, said in zip(wrong, rank, strict=True):
            assert "failed on rank 1" in said and expected in said, said


class Unknown(torch.optim.SGD):
    """Nobody knows that it steps each element alone."""


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Unknown])
def test_hooks_of_a_step_save_what_a_step_ends_with_or_nothing(kind: Any, strategy: str, tmp_path: Path) -> None:
    def run() -> list[str]:
        with seeded:
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        armed: list[str] = []
        said: list[str] = []
        engines: list[plumb.Engine] = []

        def save(where: str) -> Callable[..., None]:
            def hook(*_: object) -> None:
                if where in armed:
                    for call in (lambda: engines[0].save(tmp_path / where), lambda: engines[0].load(tmp_path / "first")):
                        try:
                            call()
                            said.append(f"{where} worked")
                            break
                        except plumb.Error as error:
                            said.append(f"{where}: {error}")
                    armed.clear()

            return hook

        optimizer.register_step_pre_hook(save("before early"))
        optimizer.register_step_post_hook(save("after early"))
        with plumb.Engine(model, optimizer, strategy=strategy) as engine:
            engines.append(engine)
            engine.save(tmp_path / "first")
            optimizer.register_step_pre_hook(save("before late"))
            optimizer.register_step_post_hook(save("after late"))
            ends = {}
            for where in ("before early", "before late", "after early", "after late"):
                armed.append(where)
                engine.backward(model(torch.ones(1, 3)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
                ends[where] = (engine.steps, model.weight.tolist())
            for where in ("after early", "after late"):
                assert engine.load(tmp_path / where).step == ends[where][0]
                assert model.weight.tolist() == ends[where][1]
        return said

    for said in plumb.spawn(run, 2, method="thread"):
        assert len(said) == 6 and said[4:] == ["after early worked", "after late worked"], said
        for one in said[:4]:
            assert "of a step that has not ended" in one or "inside of a step of" in one, one
        for call, one in zip(("save()", "load()"), said[2:4], strict=True):
            assert strategy == "zero1" or f"{call} inside of a step of {kind.__name__}: call it when the step has ended" in one


class Throws(Unknown):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        raise ArithmeticError


def throw(*_: object) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", [Throws, torch.optim.SGD])
def test_a_step_that_threw_has_ended_also_where_its_gradients_are_gone(kind: Any, strategy: str, tmp_path: Path) -> None:
    def run() -> list[list[float]]:
        with seeded:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        optimizer = kind(model.parameters(), lr=0.1)
        hook = optimizer.register_step_post_hook(throw)
        with plumb.Engine(model, optimizer, strategy=strategy, units=[torch.nn.Linear]) as engine:
            engine.backward(model(torch.ones(1, 3)).sum())
            with pytest.raises(ArithmeticError):
                optimizer.step()
            model.zero_grad()
            hook.remove()
            engine.save(tmp_path)  # it has not ended before: some ranks had not heard of others' updates
            ended = engine.full_parameter(model[0].weight).flatten().tolist()
            with engine.gathered(model, write=True), torch.no_grad():
                model[0].weight.zero_()
            assert engine.load(tmp_path).step == 1
            return [ended, engine.full_parameter(model[0].weight).flatten().tolist()]

    torch.manual_seed(0)
    expected = (torch.nn.Linear(3, 2).weight.detach() - torch.tensor(0.1)).flatten().tolist()
    for found in plumb.spawn(run, 2, method="thread"):
        assert found == [expected, expected]


def test_an_engine_is_not_closed_by_its_own_extras(tmp_path: Path) -> None:
    class Closes(Gives):
        armed = ""

        def state_dict(self) -> dict[str, Any]:
            if self.armed == "save()":
                self.value.close()
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.armed == "load()":
                self.value.close()

    with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
        extra = Closes(engine)
        for armed in ("", "save()", "load()"):
            extra.armed = armed
            for call in (engine.save, engine.load):
                if armed == f"{call.__name__}()":
                    with pytest.raises(plumb.Error, match="close\\(\\) inside of ...... of the same engine; call it afterwards"):
                        call(tmp_path, extras={"it": extra})
                else:
                    call(tmp_path, extras={"it": extra})


def test_nor_after_another_call_inside_of_the_first(tmp_path: Path) -> None:
    class Calls(Gives):
        armed = False

        def state_dict(self) -> dict[str, Any]:
            if self.armed:
                with pytest.raises(plumb.Error):
                    self.value.load_state_dict({})
                with pytest.raises(plumb.Error):
                    self.value.load(tmp_path / "nowhere")
                self.value.close()
            return {}

    with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
        extra = Calls(engine)
        extra.armed = True
        with pytest.raises(plumb.Error, match="close\\(\\) inside of save\\(\\) of the same engine; call it afterwards"):
            engine.save(tmp_path, extras={"it": extra})
        extra.armed = False
        engine.save(tmp_path, extras={"it": extra})
