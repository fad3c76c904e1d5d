"""Helps tests of the repository's scripts and tests with several processes."""

import socket
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
