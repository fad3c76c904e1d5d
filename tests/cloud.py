"""The repository, its scripts, and what tests of these need."""

import socket
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LAUNCH, DEPLOY = REPOSITORY / "launch_v5e64.sh", REPOSITORY / "deploy/deploy.sh"
# Arguments that a shell would spoil.
ODD = ["a b", "it's", 'say "x"', "$HOME `id` $(id)", "two\nlines", "back\\slash", "*", "", ";&"]


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
