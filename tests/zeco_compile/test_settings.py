"""Options are read once, typed, and refused when they are wrong."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zeco_compile.errors import CompileError, InvalidGroup, InvalidOption
from zeco_compile.lowering import cost_model
from zeco_compile.settings import Settings, option_names


@pytest.fixture(autouse=True)
def no_debug_variable(monkeypatch):
    monkeypatch.delenv("ZECO_DEBUG", raising=False)


@pytest.fixture
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def fake_group_of_four():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [None, {}, {"group": None, "blocks": None, "debug_dir": None}])
def test_defaults(options):
    settings = Settings.parse(options)
    assert settings == Settings()
    assert (settings.group, settings.world_size, settings.rank) == ("", 1, 0)
    assert (settings.seq_dim, settings.schedule, settings.blocks, settings.overlap) == (1, "auto", None, True)
    assert (settings.on_unsupported, settings.graph_breaks) == ("error", "error")
    assert (settings.codegen, settings.debug_dir) == ("inductor", None)


def test_option_names_are_the_public_ones():
    assert option_names() == [
        "group",
        "seq_dim",
        "schedule",
        "blocks",
        "overlap",
        "on_unsupported",
        "graph_breaks",
        "codegen",
        "debug_dir",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_dim", 0),
        ("seq_dim", 3),
        *[("schedule", choice) for choice in ("auto", *cost_model.SCHEDULES)],
        ("blocks", 1),
        ("blocks", 64),
        ("overlap", False),
        ("on_unsupported", "gather"),
        ("graph_breaks", "allow"),
        ("codegen", "aot_eager"),
    ],
)
def test_good_values_are_kept(name, value):
    assert getattr(Settings.parse({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("seq_dim", -1, "counted from the front"),
        ("seq_dim", True, "counted from the front"),
        ("seq_dim", 1.0, "counted from the front"),
        ("seq_dim", None, "counted from the front"),
        ("schedule", "allscan", "'all_scan'"),
        ("schedule", None, "'auto'"),
        ("schedule", ["auto"], "'auto'"),
        ("schedule", np.array(["auto", "lasp1"]), "'auto'"),
        ("blocks", 0, "at least 1"),
        ("blocks", -4, "at least 1"),
        ("blocks", True, "at least 1"),
        ("blocks", "4", "at least 1"),
        ("overlap", 1, "True or False"),
        ("overlap", None, "True or False"),
        ("overlap", "yes", "True or False"),
        ("on_unsupported", "warn", "'error' or 'gather'"),
        ("on_unsupported", True, "'error' or 'gather'"),
        ("graph_breaks", "ok", "'error' or 'allow'"),
        ("codegen", "eager", "'inductor' or 'aot_eager'"),
        ("debug_dir", 3, "the path of a folder"),
        ("debug_dir", "", "the path of a folder"),
        ("debug_dir", True, "the path of a folder"),
    ],
)
def test_bad_values_are_refused_with_what_is_accepted(name, value, accepted):
    with pytest.raises(InvalidOption) as caught:
        Settings.parse({name: value})
    assert f"option {name!r} is {value!r} (a {type(value).__name__})" in str(caught.value)
    assert accepted in str(caught.value)
    assert caught.value.name == name


def test_a_close_choice_is_suggested():
    with pytest.raises(InvalidOption, match="did you mean 'all_scan'"):
        Settings.parse({"schedule": "all-scan"})


def test_unknown_options_list_what_exists_and_the_nearest():
    with pytest.raises(InvalidOption) as caught:
        Settings.parse({"shedule": "auto"})
    assert str(caught.value).startswith("option 'shedule' does not exist. Did you mean 'schedule'?")
    for name in option_names():
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["xyz", "world_size", "rank", 7, None])
def test_unknown_options_without_a_near_one(name):
    with pytest.raises(InvalidOption, match="does not exist") as caught:
        Settings.parse({name: 1})
    assert "the options are: group, seq_dim" in str(caught.value)


@pytest.mark.parametrize("options", [[], "auto", 3, [("schedule", "auto")]])
def test_options_that_are_no_dict(options):
    with pytest.raises(InvalidOption, match=r"`options` is .* has to be a dict"):
        Settings.parse(options)


def test_long_values_are_cut_in_the_message():
    with pytest.raises(InvalidOption) as caught:
        Settings.parse({"codegen": "x" * 1000})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("group", ["cp", 0, [0, 1], torch.ones(2), object()])
def test_a_group_that_is_none_is_refused_as_a_compile_error(group):
    with pytest.raises(InvalidGroup, match="`group`") as caught:
        Settings.parse({"group": group})
    assert isinstance(caught.value, CompileError)


def test_a_group_of_one_is_one_rank(one_rank_group):
    assert Settings.parse({"group": one_rank_group}) == Settings()
    assert Settings.parse({"group": init_device_mesh("cpu", (1,))}) == Settings()


def test_the_default_group_gives_name_size_and_rank(fake_group_of_four):
    settings = Settings.parse()
    assert settings == Settings.parse({"group": fake_group_of_four})
    assert (settings.group, settings.world_size, settings.rank) == (fake_group_of_four.group_name, 4, 2)
    assert settings.to_dict()["group"] == f"'{fake_group_of_four.group_name}', ranks [0, 1, 2, 3]"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings.parse().overlap = False


def test_to_dict_is_plain_data(tmp_path):
    shown = Settings.parse({"debug_dir": tmp_path}).to_dict()
    assert list(shown) == option_names()
    assert json.loads(json.dumps(shown))["debug_dir"] == str(tmp_path)
    assert shown["group"] == "one rank"


def test_debug_dir_of_the_option_wins_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ZECO_DEBUG", str(tmp_path / "variable"))
    assert Settings.parse().debug_dir == tmp_path / "variable"
    assert Settings.parse({"debug_dir": None}).debug_dir == tmp_path / "variable"
    assert Settings.parse({"debug_dir": str(tmp_path / "option")}).debug_dir == tmp_path / "option"
    assert Settings.parse({"debug_dir": tmp_path / "option"}).debug_dir == tmp_path / "option"
    monkeypatch.setenv("ZECO_DEBUG", "")
    assert Settings.parse().debug_dir is None


def test_a_relative_debug_dir_is_meant_from_the_folder_at_hand(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Settings.parse({"debug_dir": "dumps"}).debug_dir == tmp_path / "dumps"
    assert Settings.parse({"debug_dir": "~/dumps"}).debug_dir == Path.home() / "dumps"


def test_identity_changes_with_every_option_that_shapes_the_program():
    changed = {
        "group": "3",
        "seq_dim": 2,
        "schedule": "lasp1",
        "blocks": 4,
        "overlap": False,
        "on_unsupported": "gather",
        "graph_breaks": "allow",
        "codegen": "aot_eager",
        "world_size": 2,
        "rank": 1,
    }
    assert changed.keys() | {"debug_dir"} == {field.name for field in dataclasses.fields(Settings)}
    identities = {
        dataclasses.replace(Settings(), **{name: value}).identity() for name, value in changed.items()
    }
    assert len(identities | {Settings().identity()}) == len(changed) + 1


def test_identity_does_not_see_where_dumps_go(tmp_path):
    assert Settings.parse({"debug_dir": tmp_path}).identity() == Settings.parse().identity()


def test_identity_is_the_same_in_another_process():
    script = "from zeco_compile.settings import Settings; print(Settings.parse({'blocks': 3}).identity())"
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        env=environment,
        text=True,
        timeout=120,
    )
    assert other.stdout.strip() == Settings.parse({"blocks": 3}).identity()
