"""The translations of the pages in docs/locale: what is missing, what is out of date.

`templates` is a folder with all that can be translated, *.pot, as Sphinx has written it; `locale`
has a folder for each language, with a file *.po for each page of which a translation was begun.
"""

import io
import re

from babel.messages.pofile import read_po, write_po

# Lines of a translation's header that would change with every update, and tell nothing.
HEADER = re.compile(rb'"(POT-|PO-|Report-|Last-Tr|Language-T|Generated-By).*\n')


def read_catalog(path):
    """Return the messages of a .pot or .po file."""
    with open(path, "rb") as file:
        return read_po(file)


def untranslated(template, translation):
    """Return (what has no translation, what is translated but no longer in the page)."""
    wanted = {message.id for message in template if message.id}
    done = {message.id for message in translation if message.id and message.string}
    return sorted(wanted - done), sorted(done - wanted)


def look_at_translations(templates, locale):
    """Print what is untranslated or out of date; return whether all begun pages are complete."""
    complete = True
    pages = [path for path in sorted(templates.rglob("*.pot")) if "." not in path.stem]  # no code
    for folder in sorted(locale.glob("*/LC_MESSAGES")):
        for template in pages:
            name = template.relative_to(templates).with_suffix("")
            path, begin = folder / name.with_suffix(".po"), f"{folder.parent.name}  {name}"
            if not path.exists():
                print(f"{begin}: not begun")
                continue
            missing, outdated = untranslated(read_catalog(template), read_catalog(path))
            print(f"{begin}: {len(missing)} missing, {len(outdated)} out of date")
            for text in missing:
                print(f"    missing: {text[:70]}")
            complete = complete and not missing and not outdated
    return complete


def merge_translations(templates, locale):
    """Bring the translations up to date: what is new in them is still empty."""
    for path in sorted(locale.glob("*/LC_MESSAGES/**/*.po")):
        language = path.relative_to(locale).parts[:2]
        template = templates / path.relative_to(locale.joinpath(*language)).with_suffix(".pot")
        translation = read_catalog(path)
        translation.update(read_catalog(template), no_fuzzy_matching=True)
        written = io.BytesIO()
        write_po(written, translation, width=100, ignore_obsolete=True)
        path.write_bytes(HEADER.sub(b"", written.getvalue()))
