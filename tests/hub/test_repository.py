"""Names of models, and what a repository's files amount to."""

from pathlib import Path

import pytest

from pshard.errors import UserError
from pshard.hub.compare_quants import QuantOutlook, choose_quant
from pshard.hub.reference import HubReference, parse_reference
from pshard.hub.repository import HubFile, pick_model, sort_files


@pytest.mark.parametrize(
    "text, repo, wanted",
    [
        ("Qwen/Qwen3-8B-GGUF", "Qwen/Qwen3-8B-GGUF", ""),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B-GGUF", "Q4_K_M"),
        ("hf.co/Qwen/Qwen3-8B-GGUF:q8_0", "Qwen/Qwen3-8B-GGUF", "q8_0"),
        ("https://huggingface.co/Qwen/Qwen3-8B-GGUF/", "Qwen/Qwen3-8B-GGUF", ""),
        ("https://huggingface.co/a/b/resolve/main/dir/c-Q4_0.gguf?download=true", "a/b", "dir/c-Q4_0.gguf"),
        ("hf.co/a/b/blob/main/c.gguf", "a/b", "c.gguf"),
        ("a/b:dir/c-Q4_0.gguf", "a/b", "dir/c-Q4_0.gguf"),
    ],
)
def test_a_model_of_the_hub_is_named_by_repository_and_quantisation(text, repo, wanted) -> None:
    assert parse_reference(text) == HubReference(repo, wanted)


@pytest.mark.parametrize(
    "text", ["model.gguf", "./a/b", "/a/b", "~/a/b", "models/x.gguf", "a/b/c", "..", "a", "a/b.GGUF"]
)
def test_a_path_is_no_model_of_the_hub(text) -> None:
    assert parse_reference(text) is None


def test_what_exists_here_is_not_looked_up_elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert parse_reference("models/mine") is None
    assert parse_reference("models/theirs") == HubReference("models/theirs")


def sort(*names: str, nbytes: int = 1) -> list[str]:
    return [model.label for model in sort_files(HubFile(name, nbytes + i) for i, name in enumerate(names))]


def test_labels_are_the_quantisations_that_names_end_with() -> None:
    names = ["x-7b.Q4_K_M.gguf", "x-7b-IQ2_XXS.gguf", "x-7b-UD-Q4_K_XL.gguf", "x-7b-f16.gguf", "x-mxfp4.gguf"]
    assert sort(*names) == ["Q4_K_M", "IQ2_XXS", "UD-Q4_K_XL", "F16", "MXFP4"]
    assert sort("BF16/x-00001-of-00002.gguf", "BF16/x-00002-of-00002.gguf") == ["BF16"]
    assert sort("Qwen3-8B.gguf") == ["Qwen3-8B.gguf"]


def test_files_beside_models_are_none() -> None:
    assert sort("mmproj-x-f16.gguf", "x-Q4_0.gguf", "imatrix.gguf", "README.md") == ["Q4_0"]


def test_a_split_model_that_lacks_a_part_is_none() -> None:
    assert sort("x-Q4_0-00001-of-00003.gguf", "x-Q4_0-00003-of-00003.gguf", "x-Q8_0.gguf") == ["Q8_0"]


def test_models_of_one_label_are_told_apart_by_their_files() -> None:
    assert sort("a-Q4_0.gguf", "b-Q4_0.gguf") == ["a-Q4_0.gguf", "b-Q4_0.gguf"]


def test_a_repository_without_gguf_files_is_a_folder() -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"]
    names += ["model.safetensors.index.json", "original/consolidated.00.pth", "README.md", "pytorch_model.bin"]
    (model,) = sort_files(HubFile(name, 1) for name in names)
    assert model.is_folder
    assert {file.name for file in model.files} == set(names[:5])
    assert not sort("model.safetensors", "README.md")  # nobody knows what is in it


def test_a_name_alone_means_a_usual_quantisation() -> None:
    models = sort_files(HubFile(f"x-{q}.gguf", i) for i, q in enumerate(("Q2_K", "Q4_0", "Q4_K_M", "Q8_0")))
    assert pick_model("a/b", models, "").label == "Q4_K_M"
    assert pick_model("a/b", models[:2], "").label == "Q4_0"
    assert pick_model("a/b", models[:1], "").label == "Q2_K"
    with pytest.raises(UserError, match=r"several models; choose .* a/b:NAME, where NAME is one of IQ2_S, IQ3_S"):
        pick_model("a/b", sort_files([HubFile("IQ2_S.gguf", 1), HubFile("IQ3_S.gguf", 2)]), "")


def test_a_file_of_a_multi_token_head_belongs_to_the_model_that_is_opened_with_it() -> None:
    def heads(*names: str) -> dict[str, str | None]:
        return {m.files[0].name: m.head and m.head.name for m in sort_files(HubFile(name, 1) for name in names)}

    assert heads("x-Q4_0.gguf", "x-Q8_0.gguf", "mtp-x.gguf") == {
        "x-Q4_0.gguf": "mtp-x.gguf",
        "x-Q8_0.gguf": "mtp-x.gguf",
    }
    assert heads("x-Q4_0.gguf", "x-Q8_0.gguf", "mtp-x-Q4_0.gguf", "mtp-x-Q2_K.gguf") == {
        "x-Q4_0.gguf": "mtp-x-Q4_0.gguf", "x-Q8_0.gguf": None,
    }  # fmt: skip
    assert heads("a/x-Q4_0.gguf", "mtp-x-Q4_0.gguf") == {"a/x-Q4_0.gguf": None}
    assert heads("a/x-Q4_0.gguf", "a/mtp-y.gguf", "b/mtp-z.gguf") == {"a/x-Q4_0.gguf": "a/mtp-y.gguf"}


def test_weights_of_a_folder_are_fetched_last_so_that_a_cut_never_leaves_them_without_their_tokenizer() -> None:
    names = ["model-00001-of-00001.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
    (folder,) = sort_files(HubFile(name, 1) for name in names)
    assert folder.files[-1].name == names[0] and len(folder.files) == 4


@pytest.mark.parametrize(
    "offered, chosen, why",
    [  # (bits, tokens per second)
        ([(2.6, 40), (4.8, 30), (8.5, 12), (16, 6)], 8.5, "the most bits a weight of those that write 10"),
        ([(16, 100), (32, 50)], 16, "the fewest bits a weight of those that write 10 tokens/s or more, all above 9"),
        ([(2.6, 12), (4.8, 7), (8.5, 4)], 4.8, "none of 4 bits a weight or more writes 10 tokens/s; it is the fastest"),
        ([(2.6, 5), (3.4, 4)], 2.6, "the fastest of those that run here"),
    ],
)
def test_the_quantisation_that_we_would_take_is_chosen_for_the_reason_that_is_told(offered, chosen, why) -> None:
    outlooks = [QuantOutlook(f"{bits}", 1, bits, decode_rate=rate) for bits, rate in offered]
    found, said = choose_quant([*outlooks, QuantOutlook("IQ1_S", 1, why_not="no kernel")])
    assert found is not None and found.bits == chosen and why in said
    assert choose_quant([QuantOutlook("IQ1_S", 1, why_not="no kernel")]) == (None, "none of them runs here")
