"""Hooks through which edits write at sites of a layer: in the residual stream, or what attention or
the FFN writes there.

TransformerLens' hook of the stream between attention and FFN is only the FFN's input in most
families, and edits there do not reach the stream itself. So `SiteWriter` makes attention's output
the difference of the edited "resid_mid" from the layer's input, to which the model then adds it: a
stream of zeros has no rounding that a norm would enlarge. The FFN reads the edited stream itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.edit import SITE_STAGES, Stage
from icl_lens.errors import InputError
from icl_lens.models.view import ModelView

HOOKS = {
    Stage.resid_pre: "hook_resid_pre",
    Stage.attn_out: "hook_attn_out",
    Stage.resid_mid: "hook_resid_mid",
    Stage.mlp_post: "mlp.hook_post",
    Stage.mlp_out: "hook_mlp_out",
    Stage.resid_post: "hook_resid_post",
}
"""Site -> name of its hook in a layer."""


def site_hooks(view: ModelView, layer: int, sites: Iterable[Stage]) -> dict[str, Stage]:
    """Return hook name -> the site that `SiteWriter.write` is called with, for edits at `sites`."""
    hooked: set[Stage] = set()
    for site in sites:
        if site == Stage.resid_mid:
            hooked |= {Stage.resid_pre, Stage.attn_out, Stage.resid_mid}
        elif site in SITE_STAGES:
            hooked.add(site)
    return {view.hook(layer, HOOKS[site]): site for site in sorted(hooked)}


class SiteWriter:
    """Writes edits at the sites of one layer, in the order in which a pass reaches them."""

    def __init__(
        self, edited: Callable[[Stage, Tensor], Tensor], has_edits: Callable[[Stage], bool]
    ) -> None:
        self.edited, self.has_edits = edited, has_edits
        self.resid_pre: Tensor | None = None
        self.resid_mid: Tensor | None = None

    def write(
        self, site: Stage, x: Float[Tensor, "row pos width"]
    ) -> Float[Tensor, "row pos width"]:
        """Return what is at a site that has a hook, with the edits."""
        if site == Stage.resid_mid:
            x, self.resid_mid = x if self.resid_mid is None else self.resid_mid.to(x), None
            return x
        if self.has_edits(site):
            x = self.edited(site, x.clone())
        if site == Stage.resid_pre and self.has_edits(Stage.resid_mid):
            self.resid_pre = x.clone()  # some families add to it in place
        if site == Stage.attn_out and self.has_edits(Stage.resid_mid):
            assert self.resid_pre is not None
            resid_pre = self.resid_pre.to(x.device)
            before = resid_pre + x
            self.resid_mid = self.edited(Stage.resid_mid, before.clone())
            # Where nothing changes, attention's output keeps every bit.
            x = torch.where(self.resid_mid == before, x, self.resid_mid - resid_pre)
            self.resid_pre = None
        return x

    def hooks(
        self, view: ModelView, layer: int, sites: Iterable[Stage]
    ) -> list[tuple[str, Callable[..., Tensor]]]:
        """Return hooks that write at `sites` of a layer."""

        def writing(site: Stage) -> Callable[..., Tensor]:
            return lambda x, hook: self.write(site, x)

        return [(name, writing(site)) for name, site in site_hooks(view, layer, sites).items()]


def recording_site(
    view: ModelView, layer: int, site: Stage, read: Callable[[Tensor], Any]
) -> list[tuple[str, Callable[..., Tensor]]]:
    """Return hooks that call `read` with what is at a site of a layer."""

    def seen(_: Stage, x: Tensor) -> Tensor:
        read(x.detach())
        return x

    return SiteWriter(seen, lambda edited_site: edited_site == site).hooks(view, layer, [site])


def check_site(view: ModelView, site: Stage) -> None:
    """Raise InputError for a site that the model does not have."""
    if site == Stage.resid_mid and view.parallel:
        raise InputError(
            f"site must be another one than 'resid_mid' for {view.architecture}, whose attention "
            "and FFN read the same input, got 'resid_mid'; use 'attn_out' or 'resid_post'"
        )
    if site == Stage.mlp_post and view.n_neurons is None:
        raise InputError(
            f"site must be another one than 'mlp_post' for {view.architecture}, whose neurons "
            "cannot be separated, got 'mlp_post'; use 'mlp_out'"
        )


def site_width(view: ModelView, site: Stage) -> int:
    """Return the number of values that a site has at each token."""
    n_neurons = view.n_neurons
    return n_neurons if site == Stage.mlp_post and n_neurons is not None else view.d_model


def within_columns(
    old: Float[Tensor, "*place width"],
    new: Float[Tensor, "*place width"],
    directions: Float[Tensor, "width direction"] | None,
) -> Float[Tensor, "*place width"]:
    """Return `new`, or `old` with its component along orthonormal directions replaced by that of
    `new`.
    """
    if directions is None:
        return new
    basis = directions.to(old.device, torch.promote_types(old.dtype, torch.float32))
    change = (new - old).to(basis) @ basis @ basis.T
    return old + change.to(old)
