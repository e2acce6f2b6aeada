"""What a stage does if it defines nothing, what is read from its class, and errors that cross processes."""

from __future__ import annotations

import pickle

import pytest

from pipeline.errors import PlanError, Problem, StageError, near
from pipeline.stage import Part, Stage, component_types, has
from tests.pipeline.stages_for_tests import GroupJudge, MeanLearner, Scale, WholeDouble


def test_a_plain_stage_refuses_what_it_cannot_do() -> None:
    stage = Stage()
    for method in ("run", "learn", "publish"):
        assert not has(Stage, method)
        with pytest.raises(TypeError, match=r"^Stage "):
            getattr(stage, method)()
    with pytest.raises(TypeError, match="takes no weights"):
        stage.receive(None)  # type: ignore[arg-type]
    assert stage.state_dict() == {}
    stage.load_state_dict({})
    with pytest.raises(ValueError, match=r"Stage keeps no state, but was given \['calls'\]"):
        stage.load_state_dict({"calls": 1})
    stage.close()
    assert stage.advice() == []
    assert list(Part().check(None)) == []  # type: ignore[arg-type]


def test_what_a_class_can_do() -> None:
    assert [m for m in ("run", "learn", "publish", "receive") if has(MeanLearner, m)] == ["run", "learn", "publish"]
    assert [m for m in ("run", "learn", "publish", "receive") if has(WholeDouble, m)] == ["run", "receive"]
    assert component_types(WholeDouble) == {"scale": Scale}
    assert component_types(GroupJudge) == {}


def test_errors_cross_processes_whole() -> None:
    error = StageError("reward", 3, "ValueError: no", range(12), "Traceback ...")
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert str(back) == "stage 'reward' failed in step 3, rows 0, 1, 2, 3, 4, 5, 6, 7 and 4 more: ValueError: no"
    assert (back.node, back.step, back.rows, back.detail) == ("reward", 3, tuple(range(12)), "Traceback ...")
    plan = PlanError([Problem(where="a.b", what="is wrong", hint="do this"), Problem(where="c", what="is odd")])
    assert str(pickle.loads(pickle.dumps(plan))) == "a.b: is wrong\n    do this\nc: is odd"


def test_near_matches() -> None:
    assert near("temprature", ["temperature", "top_p"]) == "did you mean 'temperature'? allowed: temperature, top_p"
    assert near("xyz", ["temperature"]) == "allowed: temperature"
    assert near("x", []) == "allowed: (nothing)"
