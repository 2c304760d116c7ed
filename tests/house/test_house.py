"""The house keeps its rules: arrows point down, no circles, nothing longer than one sitting, kinds in one place."""

import tomllib

from house import code_rules


def test_every_module_that_is_imported_is_there() -> None:
    assert not code_rules.find_missing_modules()


def test_editors_and_type_checkers_find_the_whole_package_in_a_plain_checkout() -> None:
    assert not code_rules.find_wrong_links()


def test_files_import_each_other_in_no_circle() -> None:
    assert not code_rules.find_circles()


def test_no_folder_imports_one_above_it() -> None:
    assert not code_rules.find_upward_arrows()


def test_no_noun_imports_one_above_it() -> None:
    assert not code_rules.find_arrows_among_nouns()


def test_no_function_or_class_is_longer_than_one_sitting() -> None:
    assert not code_rules.find_long_code()


def test_kernels_choose_by_constants_that_the_oldest_triton_takes_for_constants() -> None:
    assert not code_rules.find_choices_in_kernels()


def test_values_travel_as_nouns_and_not_by_nine_positions() -> None:
    assert not code_rules.find_long_calls()


# Numbers below are those of today: they may only fall.
def test_kinds_of_units_are_hardly_named_outside_their_declarations() -> None:
    assert len(code_rules.find_kind_names()) <= 27
    assert len(code_rules.find_kind_imports()) <= 19


def test_few_lines_ask_which_variations_a_model_has_instead_of_its_units() -> None:
    assert len(code_rules.find_variations()) <= 26


def test_code_asks_a_placement_what_it_must_know_instead_of_comparing_names() -> None:
    assert len(code_rules.find_site_names()) <= 2
    assert len(code_rules.find_compared_sites()) <= 1  # whether the name in a file is one of a site


def test_hardly_any_folders_import_each_other() -> None:
    assert len(code_rules.find_mutual_folders()) <= 4


def test_every_folder_of_the_package_is_installed() -> None:
    with open(code_rules.ROOT / "pyproject.toml", "rb") as file:
        installed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {code_rules.module_name(path) for path in code_rules.list_sources() if path.name == "__init__.py"}
    assert sorted(installed) == sorted({*folders, "pshard.examples"})  # which has programs and a model to try
