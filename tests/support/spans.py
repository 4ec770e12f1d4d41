"""Tracing that keeps its spans, for tests of what is traced and when."""

from dataclasses import dataclass, field

from loopline.telemetry.traces import Value


@dataclass
class KeptSpan:
    """One span. `traceparent` is just its number."""

    name: str
    parent: str
    traceparent: str
    attributes: dict[str, Value]
    has_ended: bool = False
    error: str = ""

    def end(self, error: str = "", **attributes: Value) -> None:
        if not self.has_ended:
            self.has_ended, self.error = True, error
            self.attributes.update(attributes)


@dataclass
class KeptTracing:
    """See `loopline.telemetry.traces.Tracing`."""

    spans: list[KeptSpan] = field(default_factory=list)

    def start(self, name: str, parent: str, **attributes: Value) -> KeptSpan:
        self.spans.append(KeptSpan(name, parent, f"span-{len(self.spans)}", attributes))
        return self.spans[-1]

    def close(self) -> None:
        pass

    def named(self, name: str) -> list[KeptSpan]:
        return [span for span in self.spans if span.name == name]

    @property
    def open_names(self) -> list[str]:
        return [span.name for span in self.spans if not span.has_ended]
