"""The logger of a platform that is no more."""

from typing import Any, Final, NoReturn

from composer._client_names import RUN_NAME_ENV_VAR
from composer_events.logger_destination import LoggerDestination

__all__ = ["MOSAICML_ACCESS_TOKEN_ENV_VAR", "MOSAICML_PLATFORM_ENV_VAR", "RUN_NAME_ENV_VAR", "MosaicMLLogger"]

# Scripts look into these variables of the environment to find out whether they run there.
MOSAICML_PLATFORM_ENV_VAR: Final = "MOSAICML_PLATFORM"
MOSAICML_ACCESS_TOKEN_ENV_VAR: Final = "MOSAICML_ACCESS_TOKEN_FILE"


class MosaicMLLogger(LoggerDestination):
    """Logged to the MosaicML platform, whose client is not developed any more, and refuses.

    The name is here for scripts that import it beside others.

    Raises:
        RuntimeError: Always, with the name of a logger to use instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "MosaicMLLogger logged to the MosaicML platform, whose client has had no release since 2025. Take "
            "composer.loggers.MLFlowLogger (on Databricks, tracking_uri='databricks'), or WandBLogger."
        )
