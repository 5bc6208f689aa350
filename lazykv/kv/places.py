"""Devices that callers give to caches: one for all layers, or one per layer."""

from collections.abc import Sequence

from lazykv.device import DeviceLike, DeviceLocation, device
from lazykv.errors import BindingError, ShapeError
from lazykv.kv.rows import check_layers


def places(
    who: str, given: DeviceLike | Sequence[DeviceLike | None], layers: int
) -> tuple[list[DeviceLocation | None], DeviceLocation | None]:
    """A location per layer, every one of them served by a backend (None: no such layer here), and
    the location that was given for all of them, if one was."""
    check_layers(who, layers)
    if not isinstance(given, Sequence) or isinstance(given, str):
        place = device(given).location
        return [place] * layers, place
    if len(given) != layers:
        raise ShapeError(f"{who}: got {len(given)} devices, need one per layer ({layers})")
    return [None if d is None else device(d).location for d in given], None


def check_device(who: str, given: DeviceLike | None, location: DeviceLocation) -> None:
    """A device that a caller names must be the storage's own."""
    if given is not None and device(given).location != location:
        raise BindingError(f"{who}: got device {device(given)}, need the cache's own {location}")
