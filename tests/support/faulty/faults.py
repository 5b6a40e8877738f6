"""The faults of a port, as a line: `gelu-erf rmsnorm@1.ln_2 scale-missing@0,2 eps-1e-6@f`.

A word alone applies everywhere; `@1` in block 1 only, `@1.ln_2` in one norm of it, `@f` in the final norm.
"""


class Faults:
    """The faults of a line, and their places."""

    def __init__(self, line: str) -> None:
        self.line = line
        words = (word.partition("@") for word in line.split())
        self.sites = {name: tuple(filter(None, sites.split(","))) for name, _, sites in words}

    def __contains__(self, name: str) -> bool:
        return name in self.sites

    def at(self, site: object) -> frozenset[str]:
        """The words that apply at a block (`1`), a norm (`1.ln_2`) or the final norm (`f`)."""
        held = (name for name, sites in self.sites.items() if not sites or any(_within(str(site), one) for one in sites))
        return frozenset(held)

    def layers(self, name: str, n_layer: int) -> list[int]:
        """The blocks that have a fault; [] if the line does not have it."""
        if name not in self.sites:
            return []
        sites = self.sites[name]
        return [int(site.split(".")[0]) for site in sites if site != "f"] if sites else list(range(n_layer))


def _within(site: str, given: str) -> bool:
    return site == given or site.startswith(given + ".")
