"""Files of settings that grow or run: what is refused at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from creditscope.diagnosis.readers.settings import settings_file
from creditscope.errors import CreditscopeError

LAUGHS = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi",
                                                                                           strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    LAUGHS, "a: !!python/object/apply:os.system ['exit 1']", "a: !!python/name:os.system", "a: " + "[" * 1000,
    "a: " + "1:" * 120_000 + "1", "a: " + "9" * 250_000, "a: 0x" + "f" * 250_000], ids=range(7))
def test_yaml_that_runs_or_grows_is_refused_in_a_moment(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    start = time.process_time()
    with pytest.raises(CreditscopeError):
        settings_file(file)
    assert time.process_time() - start < 5


def test_a_time_of_day_and_an_address_are_still_values(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("started: 12:30:15\nurl: http://[2001:db8::1]:80/a\n")
    assert settings_file(tmp_path / "a.yaml") == {"started": 45015, "url": "http://[2001:db8::1]:80/a"}
