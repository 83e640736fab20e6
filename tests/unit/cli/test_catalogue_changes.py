"""What applying a catalogue changes: the diff that is shown, and the items behind it."""

from __future__ import annotations

from dataclasses import replace

from completions.domain.catalog import ModelPrice, ModelRoute
from completions_cli.catalogue_changes import CatalogueChanges, ChangeKind, FieldChange, ModelChange, catalogue_changes
from fakes import route


def model(name: str, *aliases: str, endpoint: str = "endpoint") -> ModelRoute:
    return route(model_id=name, aliases=aliases, endpoint_name=endpoint)


def table(*routes: ModelRoute) -> dict[str, ModelRoute | None]:
    """What the table holds when ``routes`` were applied to an empty one."""
    return dict(catalogue_changes(routes, {}, prune=False).puts)


def after(before: dict[str, ModelRoute | None], changes: CatalogueChanges) -> dict[str, ModelRoute | None]:
    """The table once the changes are made."""
    assert not changes.deletes & changes.puts.keys()
    kept = {name: item for name, item in before.items() if name not in changes.deletes}
    return {**kept, **changes.puts}


def test_a_new_model_is_written_under_each_of_its_names() -> None:
    one = model("one", "uno", "un")
    changes = catalogue_changes([one], {}, prune=False)
    assert changes == CatalogueChanges(
        changes=(ModelChange(ChangeKind.ADDED, "one"),), puts={"one": one, "uno": one, "un": one}
    )


def test_what_was_applied_is_not_applied_again() -> None:
    wanted = [model("one", "uno"), model("two")]
    assert catalogue_changes(wanted, table(*wanted), prune=True) == CatalogueChanges()


def test_a_change_names_each_field_with_its_old_and_new_value() -> None:
    old = replace(model("one", "uno"), price=ModelPrice("a", 150, 75, 600), timeout_seconds=30.0)
    new = replace(old, context_length=8192, price=ModelPrice("b", 150, 75, 650), timeout_seconds=None)
    changes = catalogue_changes([new], table(old), prune=False)
    assert changes.changes == (
        ModelChange(
            ChangeKind.CHANGED,
            "one",
            (
                FieldChange("context_length", 4096, 8192),
                FieldChange("timeout_seconds", 30.0, None),
                FieldChange("price.version", "a", "b"),
                FieldChange("price.output_dollars_per_million", 0.6, 0.65),
            ),
        ),
    )
    assert changes.puts == {"one": new, "uno": new}


def test_an_alias_that_is_taken_away_leaves_the_table() -> None:
    old, new = model("one", "uno", "un"), model("one", "un")
    before = table(old)
    changes = catalogue_changes([new], before, prune=False)
    assert changes.deletes == {"uno"}
    assert after(before, changes) == table(new)


def test_an_alias_that_moves_ends_at_its_new_model() -> None:
    before = table(model("one", "best"), model("two"))
    wanted = [model("one"), model("two", "best")]
    changes = catalogue_changes(wanted, before, prune=False)
    assert changes.deletes == frozenset()
    assert after(before, changes) == table(*wanted)


def test_an_alias_that_becomes_a_model_and_a_model_that_becomes_an_alias() -> None:
    before = table(model("one", "two"))
    wanted = [model("two", "one")]
    changes = catalogue_changes(wanted, before, prune=True)
    assert after(before, changes) == table(*wanted)
    assert changes.changes == (
        ModelChange(ChangeKind.ADDED, "two", note="was an alias of 'one'"),
        ModelChange(ChangeKind.REMOVED, "one"),
    )


def test_a_model_that_the_file_does_not_have_stays_and_is_told() -> None:
    before = table(model("one"), model("old", "ancient"))
    changes = catalogue_changes([model("one")], before, prune=False)
    assert changes == CatalogueChanges(kept=("old",))


def test_pruning_removes_it_under_every_name() -> None:
    before = table(model("one"), model("old", "ancient"))
    changes = catalogue_changes([model("one")], before, prune=True)
    assert changes.changes == (ModelChange(ChangeKind.REMOVED, "old"),)
    assert after(before, changes) == table(model("one"))


def test_a_model_that_stays_gives_up_the_alias_that_another_one_gets() -> None:
    before = table(model("old", "best", "ancient"))
    changes = catalogue_changes([model("one", "best")], before, prune=False)
    assert after(before, changes) == table(model("one", "best"), model("old", "ancient"))
    assert changes.changes[1] == ModelChange(
        ChangeKind.CHANGED, "old", (FieldChange("aliases", ["best", "ancient"], ["ancient"]),)
    )


def test_an_alias_never_hides_a_model_that_stays() -> None:
    before = table(model("old"))
    changes = catalogue_changes([model("one", "old")], before, prune=False)
    assert changes.conflicts == (
        "'old' is an alias of 'one' in the file and a model's id in the table; --prune would remove that model",
    )


def test_with_pruning_an_alias_may_take_the_place_of_a_model() -> None:
    before = table(model("old", "ancient"))
    changes = catalogue_changes([model("one", "old")], before, prune=True)
    assert changes.conflicts == ()
    assert after(before, changes) == table(model("one", "old"))


def test_a_missing_or_stale_copy_is_mended() -> None:
    one = model("one", "uno", "un")
    before = {**table(one), "un": model("one", "un"), "eins": one}
    del before["uno"]
    changes = catalogue_changes([one], before, prune=False)
    assert changes.changes == (ModelChange(ChangeKind.CHANGED, "one", note="items out of step: un, uno, eins"),)
    assert after(before, changes) == table(one)


def test_an_entry_that_cannot_be_read_is_replaced_or_pruned() -> None:
    one = model("one")
    before: dict[str, ModelRoute | None] = {"one": None, "lost": None}
    kept = catalogue_changes([one], before, prune=False)
    assert kept.kept == ("lost",)
    assert kept.changes == (
        ModelChange(ChangeKind.CHANGED, "one", note="the table's entry cannot be read and is replaced"),
    )
    assert after(before, catalogue_changes([one], before, prune=True)) == table(one)


def test_an_empty_catalogue_removes_nothing_by_itself() -> None:
    before = table(model("one"))
    assert catalogue_changes([], before, prune=False) == CatalogueChanges(kept=("one",))
    assert after(before, catalogue_changes([], before, prune=True)) == {}
