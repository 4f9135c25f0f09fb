"""Files piped through a command-line compressor."""

import gzip
import shutil

import pytest

from composer_checkpoint.formats.archives import CliCompressor, CompressorNotFound, get_compressor, is_compressed_pt


@pytest.mark.parametrize(
    ("extension", "command"),
    [
        ("bz2", "bzip2"),
        ("gz", "gzip"),
        ("lz4", "lz4"),
        ("lzma", "lzma"),
        ("lzo", "lzop"),
        ("xz", "xz"),
        ("zst", "zstd"),
    ],
)
def test_the_extension_names_the_program_and_what_it_writes_it_reads(extension, command, tmp_path):
    compressor = get_compressor(f"a.pt.{extension}")
    assert (compressor.extension, compressor.cmd) == (extension, command)
    assert is_compressed_pt(f"folder.pt/a.pt.{extension}")
    if shutil.which(command) is None:
        assert not compressor.exists
        pytest.skip(f"{command} is not installed here")
    content = bytes(range(256)) * 8192
    path = tmp_path / f"a.pt.{extension}"
    with compressor.compress(path) as file:
        file.write(content)
    assert path.stat().st_size < len(content) // 10
    with compressor.decompress(path) as file:
        assert file.read() == content
    with compressor.decompress(path) as file:  # and who reads only a part is not told of a broken pipe
        assert file.read(5) == content[:5]


def test_other_programs_read_the_file(tmp_path):
    with CliCompressor("gz").compress(tmp_path / "a.gz") as file:
        file.write(b"blue fox")
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"blue fox"


def test_names_without_a_known_extension_have_no_compressor():
    assert not is_compressed_pt("a.pt")
    assert not is_compressed_pt("a.tar.gz")
    with pytest.raises(CompressorNotFound, match=r'Could not find compressor for "a\.pt\.rar"\. Known are bz2, gz'):
        get_compressor("runs/a.pt.rar")


def test_a_program_that_is_not_installed_is_told_by_name(tmp_path):
    compressor = CliCompressor("gz", cmd="no-such-program")
    assert not compressor.exists
    with pytest.raises(FileNotFoundError, match='Could not find command "no-such-program" in the PATH'):
        compressor.check_exists()
    with pytest.raises(CompressorNotFound), compressor.compress(tmp_path / "a.gz"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_program_that_fails_is_an_error_with_its_own_words(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    with (
        pytest.raises(OSError, match=r"gzip failed: .*not in gzip format"),
        CliCompressor("gz").decompress(tmp_path / "a.gz") as file,
    ):
        file.read()
