"""What an attacker who knows the format can do to a saved head: change a file and repair every hash and seal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from partita.storage.saving import canonical


def reseal(folder: Path, **changes: Any) -> None:
    """Rewrite head.json with these changes and a valid seal."""
    description = json.loads((folder / "head.json").read_text())
    description.pop("seal")
    description.update(changes)
    description["sha256"] = {
        n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in ("head.safetensors", "certificate.json")
    }
    description["seal"] = hashlib.sha256(canonical(description)).hexdigest()
    (folder / "head.json").write_text(json.dumps(description))


def forge(folder: Path, **changes: Any) -> None:
    """Rewrite certificate.json with these changes and reseal."""
    certificate = json.loads((folder / "certificate.json").read_text())
    certificate.update(changes)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    reseal(folder)
