"""Turns Python types into JSON schemas, and answers into objects of these types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_origin

from infer.boundaries import foreign
from infer.kernels.errors import InferError, RequestError
from infer.text.schemas import closed


class TypedSchema(dict[str, Any]):
    """The JSON schema of a type. Where it is pickled it becomes a dictionary: the type may be known
    in one process alone."""

    def __init__(self, kind: Any) -> None:
        """kind: a pydantic model, a dataclass, a TypedDict, or what is made of these, such as
        list[int]. Raises RequestError for one that has no schema, and without pydantic."""
        self.name = getattr(kind, "__name__", "") if get_origin(kind) is None else str(kind)
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise RequestError(
                f"schema {self.name} is a type, which pydantic makes a JSON schema of: pip install "
                "pydantic. Or give a JSON schema as a dictionary."
            ) from None
        with foreign(f"schema {self.name} gives no JSON schema", RequestError):
            self._adapter = TypeAdapter(kind)
            super().__init__(closed(self._adapter.json_schema()))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def parsed(self, text: str) -> Any:
        """The object of the type that a text is in JSON. Raises InferError for what is none."""
        with foreign(f"The answer is no {self.name}", InferError):
            return self._adapter.validate_json(text)


def is_type(value: object) -> bool:
    """Whether it is a type, or made of types."""
    return isinstance(value, type) or get_origin(value) is not None


def parsed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a text is in JSON: an object of the type that a TypedSchema is of. Raises
    InferError for what is none."""
    if isinstance(schema, TypedSchema):
        return schema.parsed(text)
    with foreign("The answer is no JSON", InferError):
        return json.loads(text)
