// A message that is pasted into the search has numbers and paths, which no page has, so that the
// search finds nothing. Here its words are looked for as explain.sh does it, in those of
// docs/errors.md: MESSAGES (docs/build/build.py writes it) has [parts of the words, place] of each.
function messagesIn(text) {
  const isThere = (parts) => {
    let at = 0;
    return parts.every((part) => {
      at = text.indexOf(part, at);
      if (at < 0) return false;
      at += part.length;
      return true;
    });
  };
  return MESSAGES.filter(([parts]) => isThere(parts));
}

function showMessages() {
  const results = document.getElementById("search-results");
  const query = new URLSearchParams(location.search).get("q");
  if (!results || !query) return;
  const base = document.documentElement.dataset.content_root ?? "";
  for (const [parts, place] of messagesIn(query)) {
    const link = document.createElement("a");
    link.href = `${base}docs/errors.html#${place}`;
    link.textContent = `By error text: ${parts.join(" … ")}`;
    const line = document.createElement("p");
    line.className = "search-message";
    line.append(link);
    results.before(line);
  }
}

document.addEventListener("DOMContentLoaded", showMessages);
