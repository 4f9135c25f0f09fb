"""Strict reader for the layout of a torch archive: the members and where their bytes lie.

A torch archive is a zip file whose members are stored uncompressed. Zip readers tolerate gaps, overlaps, duplicate
names and trailing bytes, and each tolerates different ones, so a checker and a loader could read different content from
the same file. Anything that torch does not write is therefore refused here.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Protocol

from composer_checkpoint.errors import CorruptCheckpointError

LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR_MAGIC = b"PK\x06\x07"

# Layouts of the records, from the zip specification (APPNOTE.TXT, sections 4.3.7 to 4.3.16).
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")

# A 16-bit or 32-bit field with all bits set means that the number is in a 64-bit field instead.
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED_FLAG = 1
_WIDE_NUMBERS = 1  # kind of the extra field with 64-bit numbers (zip64)
_PIECE_BYTES = 1 << 22
MAX_DIRECTORY_BYTES = 1 << 29  # a directory is read into memory, so its size has a limit


class Readable(Protocol):
    """Bytes that are read by position."""

    size_bytes: int

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly that many bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """Location of one member's bytes, and the CRC-32 that the zip file has for them."""

    name: str
    header_offset: int
    offset: int
    size_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """Members by name, without the folder that contains all of them, and the comment at the end of the file."""

    folder: str
    members: dict[str, Member]
    directory_offset: int
    comment: bytes


def read_zip_layout(file: Readable) -> ZipLayout:
    end_offset, comment = _find_end(file)
    count, size_bytes, directory_offset, end = _read_end(file, end_offset)
    if directory_offset + size_bytes != end or size_bytes > MAX_DIRECTORY_BYTES:
        raise _error(f"its directory of {size_bytes} bytes does not lie before its end record at {end_offset}")
    members = _parse_directory(file, file.read(directory_offset, size_bytes), count)
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        if member.header_offset < end:
            raise _error(f"its member {member.name!r:.200} overlaps the one before it")
        end = member.end
    if end > directory_offset:
        raise _error("its last member reaches into its directory")
    folders = {member.name.partition("/")[0] for member in members}
    if len(folders) != 1 or not all("/" in member.name for member in members):
        raise _error(f"its members are in the folders {sorted(folders)!r:.200} rather than in one")
    folder = folders.pop()
    inside = {member.name.removeprefix(f"{folder}/"): member for member in members}
    if len({name.casefold() for name in inside}) < len(members):  # torch looks names up without regard to case
        raise _error("two of its members have one name")
    return ZipLayout(folder, inside, directory_offset, comment)


def check_checksums(file: Readable) -> None:
    for member in read_zip_layout(file).members.values():
        found = 0
        for start in range(0, member.size_bytes, _PIECE_BYTES):
            piece = file.read(member.offset + start, min(_PIECE_BYTES, member.size_bytes - start))
            found = zlib.crc32(piece, found)
        if member.crc32 not in (0, found):  # torch has an option to leave checksums out
            raise CorruptCheckpointError(
                f"the bytes of {member.name!r} do not have their checksum: the file was damaged. Load another "
                f"checkpoint."
            )


def _find_end(file: Readable) -> tuple[int, bytes]:
    # A comment of up to 65535 bytes may follow the record.
    tail_bytes = min(file.size_bytes, _END.size + _FULL16)
    tail = file.read(file.size_bytes - tail_bytes, tail_bytes)
    # The last record of this kind must end the file; a comment that contains its magic fails the length check below.
    position = tail.rfind(_END_MAGIC)
    comment = tail[position + _END.size :]
    # Padded, so that a record that was cut short is refused below instead of raising an error of `struct`.
    if position < 0 or _END.unpack_from(tail.ljust(position + _END.size), position)[7] != len(comment):
        raise _error("it has no end record at its end, so it was cut short or something was added to it")
    return file.size_bytes - tail_bytes + position, comment


def _read_end(file: Readable, end_offset: int) -> tuple[int, int, int, int]:
    """Return the number of members, the directory's size and offset, and where the directory must end."""
    _, disk, _, here, count, size_bytes, offset, _ = _END.unpack(file.read(end_offset, _END.size))
    locator_offset = end_offset - _LOCATOR.size
    locator = file.read(locator_offset, _LOCATOR.size) if locator_offset >= 0 else b""
    if locator[:4] == _LOCATOR_MAGIC:
        # torch writes these 64-bit records even for small files.
        _, _, end64_offset, _ = _LOCATOR.unpack(locator)
        if end64_offset + _END64.size != locator_offset:
            raise _error(f"its 64-bit end record is not where its locator says, at {end64_offset}")
        record = _END64.unpack(file.read(end64_offset, _END64.size))
        if record[0] != _END64_MAGIC:
            raise _error(f"its 64-bit end record at {end64_offset} does not start like one")
        _, _, _, _, disk, _, here, count, size_bytes, offset = record
        end_offset = end64_offset
    if disk or here != count:
        raise _error("it is one part of several")
    return count, size_bytes, offset, end_offset


def _parse_directory(file: Readable, directory: bytes, count: int) -> list[Member]:
    members: list[Member] = []
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(directory):
            raise _error(f"its directory ends before the {count} members that it announces")
        fields = _CENTRAL.unpack_from(directory, position)
        magic, flags, method, header_offset = fields[0], fields[3], fields[4], fields[16]
        crc32, stored, size, name_bytes, extra_bytes, comment_bytes = fields[7:13]
        position += _CENTRAL.size
        raw_name = directory[position : position + name_bytes]
        name = raw_name.decode(errors="replace")
        extra = directory[position + name_bytes : position + name_bytes + extra_bytes]
        position += name_bytes + extra_bytes + comment_bytes
        if magic != _CENTRAL_MAGIC or position > len(directory) or name.encode() != raw_name:
            raise _error("its directory is damaged")
        # Members are stored uncompressed, so the two sizes must be equal.
        if _FULL32 in (size, stored, header_offset):
            size, stored, header_offset = _wide_numbers(name, extra, size, stored, header_offset)
        if method or stored != size or flags & _ENCRYPTED_FLAG:
            raise _error(f"its member {name!r:.200} is compressed or encrypted, which torch's never are")
        # The member's own header, which comes before its bytes, must have the same name.
        header = file.read(header_offset, min(_LOCAL.size + name_bytes, max(file.size_bytes - header_offset, 0)))
        local = _LOCAL.unpack_from(header.ljust(_LOCAL.size, b"\0"))
        if local[0] != LOCAL_MAGIC or local[-2] != name_bytes or header[_LOCAL.size :] != raw_name:
            raise _error(f"its member {name!r:.200} has a damaged header at {header_offset}")
        offset = header_offset + len(header) + local[-1]
        members.append(Member(name, header_offset, offset, size, crc32))
    if position != len(directory):
        raise _error("its directory has bytes that belong to no member")
    return members


def _wide_numbers(name: str, extra: bytes, size: int, stored: int, header_offset: int) -> tuple[int, int, int]:
    """Return the numbers, replaced by those of the 64-bit field where the 32-bit ones are saturated."""
    # The 64-bit field has only the numbers that are saturated, in this order.
    wide = iter(_wide_field(extra))
    found = [next(wide, None) if number == _FULL32 else number for number in (size, stored, header_offset)]
    if None in found:
        raise _error(f"its member {name!r:.200} lacks its 64-bit size")
    size, stored, header_offset = (number for number in found if number is not None)
    return size, stored, header_offset


def _wide_field(extra: bytes) -> tuple[int, ...]:
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == _WIDE_NUMBERS:
            count = min(length, len(extra) - position) // 8
            return struct.unpack_from(f"<{count}Q", extra, position)
        position += length
    return ()


def _error(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the file is not a whole torch archive: {what}. Load another checkpoint.")
