"""Dropout that trains few subnetworks."""

from composer_algorithms.gyro_dropout import GyroDropout, GyroDropoutLayer, apply_gyro_dropout

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout"]
