"""Check the CRC-32 of every member of a `torch.save` file; torch writes it and never reads it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from ..errors import SourceError

BLOCK_NBYTES = 8 * 2**20


def check_crc(path: Path) -> None:
    """Read the whole file and compare every member with its CRC-32.

    Raises:
        SourceError: A member differs (`crc-mismatch`), the file was saved without checksums
            (`crc-absent`), or it is cut short.

    Memory: one block.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.file_size]
            data = [member for member in members if "/data/" in member.filename]
            # Writers that turn checksums off store 0; a real 0 on every one of them cannot be.
            if data and not any(member.CRC for member in data):
                raise SourceError(
                    "crc-absent",
                    "a checkpoint file was saved without checksums, so they cannot be checked",
                    where=f"`{path.name}`",
                    hint="leave out --check-crc; the writer had turned CRC-32 off",
                )
            for member in members:
                check_member(archive, member, path=path)
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, NotImplementedError) as error:
        raise SourceError(
            "unreadable-file",
            "a checkpoint file cannot be read: it is cut short, damaged or not one",
            where=f"`{path.name}`",
            found=f"{type(error).__name__}: {error}",
            hint="was the save interrupted? use an earlier checkpoint",
        ) from error


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, *, path: Path) -> None:
    """Compare one member with its CRC-32."""
    expected, found = member.CRC, 0
    # The archive's own check gives no numbers; it is turned off for this member.
    member.CRC = None  # type: ignore[assignment]
    with archive.open(member) as stream:
        while block := stream.read(BLOCK_NBYTES):
            found = zlib.crc32(block, found)
    if found != expected:
        raise SourceError(
            "crc-mismatch",
            f"`{member.filename}` in a checkpoint file differs from its checksum",
            where=f"`{path.name}`",
            expected=f"CRC-32 {expected:08x}",
            found=f"{found:08x}",
            hint="disk, memory or network changed it after the save; use another copy",
        )
