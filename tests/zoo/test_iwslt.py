"""Published files of IWSLT, small ones of their layout."""

import pytest

from swiftsure_zoo import TextSample, iwslt

HEAD = "<url>http://www.ted.com/talks/{0}</url>\n<keywords>talks, rain</keywords>\n"
GERMAN = HEAD + "<speaker>A</speaker>\n<talkid>{0}</talkid>\n<title>A: Regen</title>\n"
ENGLISH = HEAD + "<speaker>A</speaker>\n<talkid>{0}</talkid>\n<title>A: Rain</title>\n"


def pair(folder, name, german, english, end=""):
    paths = folder / f"{name}.de{end}", folder / f"{name}.en{end}"
    for path, content in zip(paths, (german, english), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths


def test_training_files(tmp_path):
    german = GERMAN.format(1) + " Es regnet.\n\nViel.\n" + GERMAN.format(22) + "<3 für Regen \n"
    english = ENGLISH.format(1) + "It rains.\nOh.\nA lot.\n" + ENGLISH.format(22) + "<3 for rain\n"
    found = list(iwslt(*pair(tmp_path, "train.tags.de-en", german, english), prefix="say: "))
    assert found == [
        TextSample("1-1", "say: Es regnet.", ("It rains.",), "1"),
        TextSample("1-3", "say: Viel.", ("A lot.",), "1"),  # the second is empty in German
        TextSample("22-1", "say: <3 für Regen", ("<3 for rain",), "22"),
    ]


def xml(kind, *segments, talk="535"):
    lines = "\n".join(f'<seg id="{k}"> {each} </seg>' for k, each in enumerate(segments, 1))
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<mteval>\n<{kind} setid="iwslt2017-dev2010">\n'
        f'<doc docid="{talk}" genre="lectures">\n<title>Rain & more</title>\n{lines}\n</doc>\n'
        f'<doc genre="lectures" docid="9">\n<seg id="1">Ja.</seg>\n</doc>\n</{kind}>\n</mteval>\n'
    )


def test_development_and_test_files(tmp_path):
    paths = pair(
        tmp_path,
        "IWSLT17.TED.dev2010.de-en",
        xml("srcset", "Blitz &amp; Donner."),
        xml("refset", "Thunder &amp; lightning."),
        ".xml",
    )
    first, second = iwslt(*paths)
    assert first == TextSample(
        "535-1",
        "translate German to English: Blitz & Donner.",
        ("Thunder & lightning.",),
        "535",
    )
    assert (second.id, second.group) == ("9-1", "9")


def test_plain_text(tmp_path):
    first, second = iwslt(*pair(tmp_path, "dev", "Eins.\nZwei.\n", "One.\nTwo.\n"), prefix="")
    assert (first.text, first.references, first.group) == ("Eins.", ("One.",), "1")
    assert second.group == "2"


def test_only_line_feeds_end_a_sentence(tmp_path):
    said = iwslt(*pair(tmp_path, "dev", "Eins,\u2028zwei.\nDrei.\n", "One, two.\nThree.\n"))
    assert [sample.references for sample in said] == [("One, two.",), ("Three.",)]


def test_files_that_do_not_match(tmp_path):
    with pytest.raises(ValueError, match=r"de has 2 and .*en has 1"):
        list(iwslt(*pair(tmp_path, "dev", "Eins.\nZwei.\n", "One.\n")))
    paths = pair(tmp_path, "dev", xml("srcset", "a"), xml("refset", "b", talk="536"), ".xml")
    with pytest.raises(ValueError, match=r"has 535-1 where .* has 536-1"):
        list(iwslt(*paths))
    with pytest.raises(ValueError, match="existing file"):
        list(iwslt(tmp_path / "none.de", tmp_path / "none.en"))
