"""The live view as a widget: it passes states from the browser to the worker, and panels back.

1. `_look` is the state with an id of its text and one of what is chosen; the browser and Python
   both set it.
2. Each panel is a trait of its own and carries the ids for which it holds. The browser shows
   nothing of other ids, so that no number outlives the text that it belongs to.
3. When all panels of a state are computed, the static version in the notebook's file is replaced.
4. Of what the browser sends, only the state and the pins are taken; the other traits are Python's
   own.
"""

import json
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from icl_lens.analyses.explanation.explain import explain
from icl_lens.errors import InputError, short_repr
from icl_lens.models.active_edits import active_edits
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.html.templating import asset
from icl_lens.report.live_view.code import python_code
from icl_lens.report.live_view.panels import PANELS, Panel, Scene, compute
from icl_lens.report.live_view.state import LiveState
from icl_lens.report.live_view.static import static_html
from icl_lens.report.live_view.worker import Cancelled, Worker

PANEL_NAMES = (*(kind.name for kind in PANELS), "code")
OF_CHOICE = (*(kind.name for kind in PANELS if kind.is_of_choice), "code")
"""Panels that depend on the chosen heads as well as on the text."""
N_SCENES = 4
"""Prompts whose panels are kept, for going back to them."""
MAX_PINS, MAX_PIN_CHARACTERS = 12, 100_000
"""Pinned states that are kept, the newest, and the size of each as JSON."""
MAX_ID_CHARACTERS = 64


class LiveView(anywidget.AnyWidget):
    """A live view of one prompt (`il.live`).

    Example:
        >>> view = il.live(model, prompt)
        >>> view.wait(timeout=60)
        True
        >>> round(sum(view.numbers["answer"]["probs"]), 1) <= 1.0
        True
        >>> view.close()
    """

    _esm = f"{asset('host_theme.js')}\n{Path(__file__).with_name('live.js').read_text('utf-8')}"
    _css = str(asset("colors.css")).replace(":root", ".icl-live") + Path(__file__).with_name(
        "live.css"
    ).read_text("utf-8")

    _look = traitlets.Dict().tag(sync=True)
    _about = traitlets.Dict().tag(sync=True)
    _status = traitlets.Dict().tag(sync=True)
    _pins = traitlets.List().tag(sync=True)

    def __init__(
        self,
        model: Any,
        state: LiveState,
        template: Template,
        prepend_bos: bool | None,
        atlas_scores: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Show a state, and the scores of an atlas (`view.scores_of_atlas`); see `il.live`."""
        view = ModelView.of(model)
        self._model, self._template, self._prepend_bos = model, template, prepend_bos
        self._scenes: OrderedDict[Any, Scene] = OrderedDict()
        self._worker: Worker[dict[str, Any]] = Worker(self._compute)
        self._display_id, self._is_shown = f"icl-live-{uuid.uuid4().hex[:12]}", False
        about = {
            "model": view.name,
            "layers": view.n_layers,
            "heads": view.n_heads,
            "id": self._display_id,
            "atlas": list(atlas_scores),
        }
        self.add_traits(**{f"_{name}": traitlets.Dict().tag(sync=True) for name in PANEL_NAMES})
        super().__init__(
            _about=about | {"panels": PANEL_NAMES, "of_choice": OF_CHOICE, "max_pins": MAX_PINS}
        )
        self.observe(self._on_look, names="_look")
        self.state = state

    @property
    def state(self) -> LiveState:
        """What is looked at: a plain value. Set it to look at something else."""
        return LiveState.from_dict(self._look["state"])

    @state.setter
    def state(self, state: LiveState) -> None:
        if not isinstance(state, LiveState):
            raise InputError(
                f"state must be an il.results.LiveState, got {short_repr(state)}; see LiveView.state"
            )
        ModelView.of(self._model).check_heads(state.heads)
        token = uuid.uuid4().hex[:8]
        self._look = {"state": state.to_dict(), "text": token, "pick": token}

    @property
    def numbers(self) -> dict[str, Panel]:
        """The panels that are computed for the current state, by name; `wait` waits for all of
        them.
        """
        return {
            name: panel
            for name in PANEL_NAMES
            if self._holds(name, panel := getattr(self, f"_{name}"))
        }

    @property
    def code(self) -> str:
        """The Python calls that give the numbers of the current state; empty until the answer is
        computed.
        """
        return self.numbers.get("code", {}).get("python", "")

    @property
    def error(self) -> str:
        """Why the current state cannot be computed; empty if it can."""
        return self._status.get("error", "") if self._holds("status", self._status) else ""

    @property
    def pins(self) -> list[dict[str, Any]]:
        """The pinned states with their answers."""
        return list(self._pins)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take the state and the pins that a browser sends; ignore everything else."""
        accepted: dict[str, Any] = {}
        if "_look" in sync_data and _is_look(sync_data["_look"]):
            accepted["_look"] = sync_data["_look"]
        if "_pins" in sync_data and isinstance(sync_data["_pins"], list):
            pins = [pin for pin in sync_data["_pins"] if _is_pin(pin)]
            accepted["_pins"] = pins[-MAX_PINS:]
        super().set_state(accepted)

    def wait(self, timeout: int | float | None = None) -> bool:
        """Wait until the current state is computed, at most `timeout` seconds; return whether it
        is.
        """
        return self._worker.wait(timeout)

    def close(self) -> None:
        """Stop computing, and remove the view."""
        self._worker.close()
        super().close()

    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return the page of `explain` for the current state, or write it to `path`."""
        state = self.state
        why = state.heads[-1] if state.heads else None
        options = {
            "template": self._template,
            "prepend_bos": self._prepend_bos,
            "by": state.by,
            "why": why,
        }
        return explain(self._model, state.prompt, **options).to_html(path)

    def _holds(self, name: str, panel: Panel) -> bool:
        """Return whether a panel belongs to the current state."""
        if panel.get("text") != self._look.get("text"):
            return False
        return name not in (*OF_CHOICE, "status") or panel.get("pick") == self._look.get("pick")

    def _on_look(self, change: Any) -> None:
        self._worker.submit(change["new"])

    def _compute(self, look: dict[str, Any], is_cancelled: Callable[[], bool]) -> None:
        """Compute the panels of one state and show each; called by the worker's thread."""
        ids = {"text": look.get("text"), "pick": look.get("pick")}
        names: list[str] = []

        def tell(next_words: str = "", error: str = "") -> None:
            self._show(
                "_status",
                ids | {"done": len(names), "next": next_words, "error": error},
                is_cancelled,
            )

        try:
            tell(PANELS[0].words)
            state = LiveState.from_dict(look["state"])
            scene = self._scene(state.prompt)
            for name, panel in compute(scene, state, starts=tell):
                names.append(name)
                panel_ids = ids if name in OF_CHOICE else {"text": ids["text"]}
                self._show(f"_{name}", panel_ids | panel, is_cancelled)
                if name == "heads":
                    self._show("_code", ids | {"python": python_code(scene, state)}, is_cancelled)
            tell()
            self._save_static()
        except InputError as error:
            tell(error=str(error))
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")
            raise  # to the worker, which logs it

    def _show(self, trait: str, value: Panel, is_cancelled: Callable[[], bool]) -> None:
        if is_cancelled():
            raise Cancelled
        setattr(self, trait, value)

    def _scene(self, prompt: Prompt) -> Scene:
        """Return the scene of a prompt, kept from earlier unless the model is edited or was edited
        then.
        """
        key = prompt, active_edits(ModelView.of(self._model))
        scene = self._scenes.pop(key, None)
        if scene is None or key[1]:  # another hook at the same place has the same words
            scene = Scene(
                self._model, prompt, self._template, self._prepend_bos, check=not self._scenes
            )
        self._scenes[key] = scene
        while len(self._scenes) > N_SCENES:
            self._scenes.popitem(last=False)
        for earlier in self._scenes.values():
            if earlier is not scene:  # only their panels are kept, not their activations
                for name in ("acts", "written", "rows"):
                    earlier.__dict__.pop(name, None)
        return scene

    def __repr__(self) -> str:
        try:
            what = repr(self.state.query)
        except InputError:
            what = "no valid prompt"
        return f"LiveView({self._about.get('model', '')}: {what}); run the cell for the live view"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._save_static(first=True)
        return super()._repr_mimebundle_(**kwargs)

    def _save_static(self, *, first: bool = False) -> None:
        """Put the static version into the notebook's file, where one is open; the live view hides
        it.
        """
        if not (first or self._is_shown):
            return
        try:
            state = self.state.to_dict()
        except InputError:  # the view says what is wrong with it
            return
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display

        if get_ipython() is not None:
            html = static_html(self._about["model"], state, self.numbers, self._display_id)
            display(HTML(html), display_id=self._display_id, update=self._is_shown and not first)
            self._is_shown = True


def _is_look(value: Any) -> bool:
    """Return whether a value is a state with its ids; what is wrong in the state itself is said in
    the view.
    """
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    ids = (value.get("text"), value.get("pick"))
    return all(isinstance(name, str) and len(name) <= MAX_ID_CHARACTERS for name in ids)


def _is_pin(value: Any) -> bool:
    """Return whether a value is a pinned state with its answer, of a limited size."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    parts = (value.get("state"), value.get("answer"))
    if not all(isinstance(part, dict) for part in parts):
        return False
    try:
        return len(json.dumps(value)) <= MAX_PIN_CHARACTERS
    except (TypeError, ValueError, RecursionError):
        return False
