"""The log of who did what."""

import logging

logger = logging.getLogger(__package__)


def audit(action: str, name: str, actor: str) -> None:
    """Log who did what to which model or pool."""
    logger.info("%s id=%s by=%s", action, name, actor or "system")
