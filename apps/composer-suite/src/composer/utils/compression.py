"""Checkpoints compressed by a command-line tool, as the end of their name says."""

from composer_checkpoint.formats.archives import (
    KNOWN_COMPRESSORS,
    CliCompressor,
    CompressorNotFound,
    get_compressor,
    is_compressed_pt,
)

__all__ = ["KNOWN_COMPRESSORS", "CliCompressor", "CompressorNotFound", "get_compressor", "is_compressed_pt"]
