"""Answers that follow a grammar, an expression or a choice; and what is told of a rule that cannot be kept."""

import re

import pytest
from http_client import ask
from test_chat_route import allowed

HI = [{"role": "user", "content": "ROMEO:"}]
BODIES = {"/v1/completions": {"prompt": "ROMEO:", "max_tokens": 40}, "/v1/chat/completions": {"messages": HI}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
GBNF = 'root ::= greeting "!"+\ngreeting ::= "hi" | "oh-" [a-c]'


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("more", "right", "wrong"), [
    ({"grammar": GBNF}, "oh-b!!", "hi"), ({"ebnf": GBNF}, "hi!", "oh-d!"), ({"guided_grammar": GBNF}, "hi!", "h"),
    ({"structured_outputs": {"grammar": 'start: "a" | /b+/'}}, "bbb", "ab"),
    ({"guided_regex": "[0-9]{2}/x"}, "12/x", "1/x"), ({"regex": "a|b"}, "b", "ab"),
    ({"structured_outputs": {"regex": "^no$"}}, "no", "nono"),
    ({"guided_choice": ["yes", 'a "no"\n']}, 'a "no"\n', "a"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "noyes"),
    ({"guided_json": CITY}, '{"city":"Rome"}', '{"city": "Rome"}'), ({"json_schema": CITY}, '{"city":"Bern"}', "{}"),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true", "1"),
    ({"structured_outputs": {"json_object": True}}, '{"a":1}', "[]"),
])  # fmt: skip
def test_an_answer_follows_what_was_asked_by_any_of_its_names(app, service, path, more, right, wrong) -> None:
    assert ask(app, path, BODIES[path] | {"max_tokens": 1} | more).status_code == 200
    assert allowed(service, right) and not allowed(service, wrong)


def test_an_answer_by_a_grammar_ends_where_the_grammar_does(app) -> None:
    choice = ask(app, "/v1/completions", BODIES["/v1/completions"] | {"guided_regex": "(ab){3}"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ababab", "stop")
    body = {"messages": HI, "guided_choice": ["yes", "no"], "temperature": 0}
    assert ask(app, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("more", "where", "shown"), [
    ({"grammar": 'root ::= item\nitem ::= "a" lost'}, "grammar", 'no rule \'lost\', in the rule: item ::= "a" lost'),
    ({"grammar": 'root ::= my-item\nmy-item ::= "x" [z-a]'}, "grammar", 'in the rule: my-item ::= "x" [z-a]'),
    ({"grammar": 'root ::= ("a"'}, "grammar", 'in the rule: root ::= ("a"'),
    ({"structured_outputs": {"grammar": "start: /(/"}}, "structured_outputs.grammar", "in the rule: start: /(/"),
    ({"guided_regex": "[a"}, "guided_regex", 'invalid regex "[a": unclosed character class'),
    ({"guided_json": {"type": "objct"}}, "guided_json", "type"), ({"guided_json": "{"}, "guided_json", "is no JSON"),
    ({"guided_choice": [1]}, "guided_choice[0]", "is a text"),
    ({"grammar": "root ::= [a]", "regex": "a"}, "regex", "beside grammar"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "beside response_format"),
])  # fmt: skip
def test_a_rule_that_cannot_be_kept_is_shown_as_it_was_written(app, path, more, where, shown) -> None:
    error = ask(app, path, BODIES[path] | more).json()["error"]
    assert error["param"] == where and shown in error["message"], error
    assert not re.search(r"%llguidance|MY_ITEM|\d+ \|", error["message"])  # Lark that nobody wrote


def test_a_grammar_beside_tools_is_refused_and_nothing_asks_for_nothing(app) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = ask(app, "/v1/chat/completions", {"messages": HI, "tools": tools, "grammar": GBNF}).json()["error"]
    assert error["param"] == "grammar" and "tools" in error["message"]
    nothing = {"grammar": "", "guided_json": None, "guided_choice": [], "structured_outputs": {}, "max_tokens": 1}
    assert ask(app, "/v1/completions", BODIES["/v1/completions"] | nothing).status_code == 200
