"""The table is whole: it has each key of verl's configurations, is true about defaults, and fits our settings."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from importers.verl import page, source, table
from importers.verl.recipe import Kind, classify, composed, settings_of
from importers.verl.source import FACTS, Config, Given, defaults, leaves
from importers.verl.table import RULES
from pipeline.config import slot_of
from pipeline.errors import PlanError

installed = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="compares with the installed verl")


def keys(cfg: Any) -> frozenset[str]:
    return frozenset(leaves(OmegaConf.to_container(cfg, resolve=False)))


def config(engine: str = "dp", **values: Any) -> Config:
    """verl's configuration with some keys given ('__' for '.')."""
    default, version, complete = defaults(engine)
    whole, by_key = copy.deepcopy(default), {}
    for name, value in values.items():
        key = name.replace("__", ".")
        OmegaConf.update(whole, key, value, force_add=True)
        by_key[key] = Given(key, value, f"{key}={value}")
    return Config(whole, by_key, keys(default), version, default, complete)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__name": "hf"},
    {"algorithm__rollout_correction__bypass_mode": True, "actor_rollout_ref__actor__clip_ratio_low": None},
    {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm", "actor_rollout_ref__rollout__name": "vllm"},
    {"reward__reward_model__enable": True, "reward__reward_model__model_path": "x", "trainer__device": "cpu"},
    {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2, "actor_rollout_ref__rollout__val_kwargs__n": 4},
    {"custom_reward_function__path": "x.py", "custom_reward_function__reward_kwargs__a": 1, "reward__num_workers": 2},
    {"actor_rollout_ref__actor__policy_loss__loss_mode": "clip_cov", "actor_rollout_ref__rollout__max_num_seqs": 9},
]


@installed
@pytest.mark.parametrize("engine", source.ENGINES)
def test_every_key_of_verl_is_classified(engine: str) -> None:
    """Exactly once, by a rule, and none as unknown."""
    c = config(engine)
    assert len(c.known) > 800
    for key in c.known:
        line = classify(c, Given(key, None, key))
        assert line.kind is not Kind.unknown, key
        assert line.note or line.settings or line.kind is Kind.mapped, key
    assert settings_of(c)[0]["/pipeline"] == "ppo"


@installed
def test_every_rule_is_about_a_key_of_verl() -> None:
    """A rule that fits nothing is a typo; no key has two."""
    every = frozenset().union(*(keys(defaults(e)[0]) for e in source.ENGINES))
    idle = [r.keys for r in RULES if not r.open and not any(fnmatch.fnmatchcase(k, r.keys) for k in every)]
    assert idle == []
    assert len({r.keys for r in RULES}) == len(RULES)


@installed
def test_facts_are_the_defaults_of_the_installed_verl() -> None:
    default, version, complete = defaults()
    assert complete
    assert version.startswith("0.9."), "another verl is installed: look at the table again, and at defaults.yaml"
    whole: Any = OmegaConf.to_container(default, resolve=False)
    facts: Any = OmegaConf.to_container(OmegaConf.load(FACTS), resolve=False)
    for key in leaves(facts):
        mine, its = facts, whole
        for name in key.split("."):
            mine, its = mine[name], its[name]
        assert mine == its, key


@pytest.fixture
def without_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    defaults.cache_clear()
    yield
    defaults.cache_clear()


@installed
def test_without_verl_the_same_recipe_comes_out(request: pytest.FixtureRequest) -> None:
    made = [settings_of(config(**v))[0] for v in VARIANTS]
    request.getfixturevalue("without_verl")
    assert not defaults()[2]
    assert [settings_of(config(**v))[0] for v in VARIANTS] == made


def test_without_verl_a_key_that_no_rule_has_is_unknown(without_verl: None) -> None:
    c = config()
    assert classify(c, Given("actor_rollout_ref.rollout.temprature", 1, "")).kind is Kind.unknown
    assert classify(c, Given("actor_rollout_ref.actor.fsdp_config.fsdp_size", 1, "")).kind is Kind.none


@pytest.mark.parametrize("values", VARIANTS, ids=range(len(VARIANTS)))
def test_a_rule_sets_only_what_it_names_and_no_two_disagree(values: dict[str, Any]) -> None:
    c, made = config(**values), dict[str, Any]()
    for rule in RULES:
        whole = rule if "*" in rule.keys else dataclasses.replace(rule, given=False)
        for path, value in whole.settings(c).items():
            assert any(fnmatch.fnmatchcase(path, h) for h in rule.here), f"{rule.keys} sets {path}"
            assert made.setdefault(path, value) == value, f"{rule.keys} says {path}={value}, another {made[path]}"


def test_every_setting_of_the_table_is_one_of_ours() -> None:
    chosen = {"pipeline": "ppo", "loader": "parquet", "loader@eval_loader": "parquet", "rollout": "vllm_async"}
    cfg = composed({**chosen, "reward": "function"})
    groups = {*cfg.hydra.runtime.choices, "pipeline"}
    for rule in RULES:
        for here in rule.here:
            if here.startswith("/"):
                assert here[1:] in groups, rule.keys
            elif not here.endswith(".*"):
                assert slot_of(cfg, here) is not None, f"{rule.keys}: there is no {here}"


BASE = config()
GIVEN = sorted(k for k in keys(defaults()[0]) if "_target_" not in k)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.sampled_from(GIVEN), max_size=12))
def test_saying_verls_defaults_changes_nothing_that_matters(names: set[str]) -> None:
    """Only settings that change no number are carried over for being said."""
    c = dataclasses.replace(BASE, given={key: Given(key, None, key) for key in names})
    kinds = [classify(c, g).kind for g in c.given.values()]
    assert Kind.unknown not in kinds
    quiet = {h for r in RULES if r.given for h in r.here}
    plain, said = settings_of(BASE)[0], settings_of(c)[0]
    assert {k: v for k, v in said.items() if k not in quiet} == {k: v for k, v in plain.items() if k not in quiet}


CARRIED = sorted(r.keys for r in RULES if r.here and "*" not in r.keys)
ODD = [None, "", "x", "${nowhere}", -5, 0, 1.5, True, [], ["a", 1], float("nan"), 10**30]
FEW: Any = OmegaConf.load(FACTS)
"""Quicker to copy than all of verl's configuration."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(CARRIED), st.sampled_from(ODD), min_size=1, max_size=3))
def test_odd_values_become_settings_or_problems(values: dict[str, Any]) -> None:
    """The plan judges settings; what cannot become one is a problem at its key, and never a traceback."""
    c = Config(copy.deepcopy(FEW), {k: Given(k, v, k) for k, v in values.items()}, keys(FEW), "0.9.1", FEW, False)
    for key, value in values.items():
        OmegaConf.update(c.whole, key, value, force_add=True)
    problems: Any = ()
    for line in (classify(c, g) for g in c.given.values()):
        assert line.kind is not Kind.unknown
    try:
        settings_of(c)
    except PlanError as e:
        problems = e.problems
    assert all(p.where and p.what for p in problems)


def same(key: str, value: Any, expected: bool, **values: Any) -> None:
    rule = table.find(key)
    assert rule
    c = config(**{key.replace(".", "__"): value}, **values)
    line = classify(c, c.given[key])
    assert (line.kind is Kind.mapped) is expected, (key, value, line)


def test_what_is_off_in_verl_is_as_here() -> None:
    for key, off, on in (
        ("actor_rollout_ref.actor.use_kl_loss", False, True),
        ("algorithm.use_kl_in_reward", False, True),
        ("algorithm.filter_groups.enable", False, True),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", -1, 10),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", "constant", "cosine"),
        ("actor_rollout_ref.model.lora_rank", 0, 16),
        ("actor_rollout_ref.rollout.multi_turn.enable", False, True),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 1, 2),
        ("trainer.critic_warmup", 0, 5),
        ("trainer.logger", ["console"], ["console", "wandb"]),
        ("trainer.nnodes", 1, 2),
        ("data.truncation", "left", "left"),
    ):
        same(key, off, off != on, data__filter_overlong_prompts=key == "never")
        same(key, on, False)
    same("data.truncation", "left", True, data__filter_overlong_prompts=True)


def test_the_page_is_made_of_the_table() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.inserted(text), "run: python -m importers.verl.page"
    for rule in RULES:
        assert page._short(rule.keys) in text


def test_neighbours_without_an_equal_share_a_line_of_the_page() -> None:
    rules = [table.none("a.b", "why"), table.none("a.c", "why"), table.none("a.d", "other"), table.rule("a.e", "x")]
    assert list(page._rows(rules)) == [
        "| `a.b`, `a.c` | none | why |",
        "| `a.d` | none | other |",
        "| `a.e` | `x` |  |",
    ]
