"""What every operation needs of Triton and of the card: names, compiling, launching, descriptors."""

import importlib.metadata

import channels


def require_own_channels() -> None:
    """ImportError if what Python imports as `channels` is not the package of that name that comes with gluon_attn.

    Django Channels has the same import name. Who has both gets the one that was installed last.
    """
    if hasattr(channels, "SharedMemoryChannel"):
        return
    where = getattr(channels, "__file__", None)
    owners = importlib.metadata.packages_distributions().get("channels", [])
    others = [name for name in dict.fromkeys(owners) if name.lower().replace("_", "-") != "gluon-attn"]
    named = f", of the distribution {' or '.join(others)}" if others else ""
    raise ImportError(
        f"channels: expected the package that comes with gluon-attn, got {where or 'another one'}{named}. Another "
        "distribution has a package of that name (Django's is called channels). Uninstall it here (pip uninstall "
        f"{' '.join(others) or 'channels'}) and reinstall gluon-attn, or use a virtual environment without it, or put "
        "the folder with gluon-attn's channels first on PYTHONPATH",
        name="channels",
        path=where,
    )


require_own_channels()
