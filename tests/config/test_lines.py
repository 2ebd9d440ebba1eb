import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.keys import MISSING, key_lines, value_at

names = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True)
scalars = st.sampled_from(
    [
        "1",
        "-2.5e3",
        "true",
        '"a = b # c"',
        "'[x]'",
        "1979-05-27 07:32:00",
        '"""one\n\\"""two\n"""',
        "'''\n[no]\n'''",
        '""',
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n  " + " , # note ]\n".join(items) + "\n]"),
        st.dictionaries(names, inner.filter(lambda v: "\n" not in v), max_size=3).map(
            lambda pairs: "{ " + ", ".join(f"{k} = {v}" for k, v in pairs.items()) + " }"
        ),
    ),
    max_leaves=5,
)
noise = st.sampled_from(["", "\n", "# [comment]\n", "  \n# a = 1\n"])


@st.composite
def documents(draw):
    """A TOML text, and for every key that it writes the line on which it does."""
    text, expected, tables = "", {}, {}
    for table in [(), *draw(st.lists(names.map(lambda n: (n,)), unique=True, max_size=3))]:
        repeats = draw(st.integers(0, 2)) if table else 0  # 0: a plain table; more: an array of so many
        for index in range(max(repeats, 1)):
            path = (*table, index) if repeats else table
            if table:
                text += draw(noise) + (f"[[{table[0]}]]\n" if repeats else f"[ {table[0]} ]\n")
                tables[path] = text.count("\n")
            for key in draw(st.lists(names, unique=True, max_size=3)):
                if not table and key in {t[0] for t in tables}:
                    continue
                text += draw(noise)
                expected[(*path, key)] = text.count("\n") + 1
                text += f"{key} = {draw(values)}\n"
    return text, expected | tables


@settings(max_examples=60, deadline=None)
@given(documents())
def test_every_key_and_table_is_found_on_its_line(document):
    text, expected = document
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # a name that is both a key and a table
    found = key_lines(text)
    assert expected.items() <= found.items()
    assert all(value_at(data, place) is not MISSING for place in found)


def test_dotted_and_quoted_keys_are_followed():
    found = key_lines('a.b = 1\n"c d".e = 2\n[x."y.z"]\nk=3\n')
    assert found[("a", "b")] == 1
    assert found[("c d", "e")] == 2
    assert found[("x", "y.z", "k")] == 4


def test_a_table_inside_an_array_of_tables_belongs_to_the_latest_one():
    found = key_lines('[[task]]\nsource = "a"\n[[task]]\n[task.options]\nmin = 1\n')
    assert found[("task", 1, "options", "min")] == 5


def test_keys_of_inline_tables_over_several_lines_are_found():
    assert key_lines("task = [\n  {source = 'a'},\n  {source = 'b', level = 3},\n]\n")[("task", 1, "level")] == 3


@given(st.text("[]{}=,\"'\n#ab.1 ", min_size=1).map(lambda text: "k=" + text))
def test_text_that_is_no_toml_neither_hangs_nor_breaks_it(text):
    key_lines(text)
