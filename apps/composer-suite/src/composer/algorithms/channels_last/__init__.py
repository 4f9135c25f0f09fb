"""Channels side by side in memory."""

from composer_algorithms.channels_last import ChannelsLast, apply_channels_last

__all__ = ["ChannelsLast", "apply_channels_last"]
