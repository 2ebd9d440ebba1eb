"""Credentials and join tokens: whose they are, where they are kept, and what is said of those that are none."""

import json
import os
import stat
from types import SimpleNamespace

import pytest

from offbeat.client.credentials import Credentials, load, own_secret, read_token, save
from offbeat.errors import UserError
from offbeat.ledger.workers import Role

GIVEN = Credentials("https://c:1", "w", "s" * 43, Role.ROLLOUT, "demo")


def test_credentials_are_their_owners_alone_and_survive(tmp_path):
    file = tmp_path / "deep" / "credentials.json"
    save(file, GIVEN)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(file) == GIVEN
    assert os.listdir(file.parent) == [file.name]
    assert GIVEN.secret not in repr(GIVEN)


def test_credentials_that_others_can_read_are_refused(tmp_path):
    file = tmp_path / "c.json"
    save(file, GIVEN)
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        load(file)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"url": 1})])
def test_what_holds_no_credentials_is_named(tmp_path, text):
    file = tmp_path / "c.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UserError, match=r"c\.json: holds no credentials"):
        load(file)


def test_where_nothing_was_saved_nothing_is_loaded(tmp_path):
    assert load(tmp_path / "absent") is None


def test_the_secret_to_join_with_is_the_same_for_the_same_token_in_the_same_folder_alone(tmp_path):
    """So whoever is killed while it joins can join again; what anybody could read is no key to it."""
    file = tmp_path / "deep" / "joining.key"
    secret = own_secret(file, "token")
    assert own_secret(file, "token") == secret
    assert own_secret(file, "another") != secret
    assert own_secret(tmp_path / "elsewhere.key", "token") != secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(bytes.fromhex(secret)) == 32


@pytest.mark.parametrize("text", ["", "no key", "ab"])
def test_a_key_that_is_none_is_named_and_not_quoted(tmp_path, text):
    (tmp_path / "joining.key").write_text(text)
    with pytest.raises(UserError, match=r"joining\.key: holds no key for joining; delete this file, and join"):
        own_secret(tmp_path / "joining.key", "token")


def test_a_person_at_a_terminal_is_asked_for_the_token_and_it_is_not_shown(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or " typed ")
    assert read_token(None, {}) == "typed"
    assert read_token(None, {"OFFBEAT_TOKEN": "set"}) == "set"
    assert len(asked) == 1
    assert "offbeat worker token RUN" in asked[0]
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")
    with pytest.raises(UserError, match="OFFBEAT_TOKEN is not set"):
        read_token(None, {})


def test_a_token_comes_from_a_file_or_the_environment(tmp_path):
    (tmp_path / "token").write_text("  from a file\n")
    assert read_token(tmp_path / "token", {}) == "from a file"
    assert read_token(None, {"OFFBEAT_TOKEN": " from the environment "}) == "from the environment"
    for environment in ({}, {"OFFBEAT_TOKEN": " "}):
        with pytest.raises(UserError, match="OFFBEAT_TOKEN is not set"):
            read_token(None, environment)
    with pytest.raises(UserError, match="absent"):
        read_token(tmp_path / "absent", {})
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="empty"):
        read_token(tmp_path / "token", {})
