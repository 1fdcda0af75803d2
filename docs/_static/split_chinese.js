// Chinese is written without spaces. Its words are found by their pairs of characters, in the index
// (docs/conf.py) and in what is typed into the search.
function splitQuery(query) {
  const parts = [];
  for (const word of query.match(/[\p{L}\p{N}_]+/gu) || []) {
    parts.push(...word.match(/\p{Script=Han}+|\P{Script=Han}+/gu));
  }
  return parts.flatMap(pairs);
}

// The pairs of neighbours in a run of Chinese characters; any other word is itself.
function pairs(part) {
  const characters = Array.from(part);
  if (characters.length === 1 || !/\p{Script=Han}/u.test(part)) {
    return [part];
  }
  return characters.slice(1).map((character, i) => characters[i] + character);
}

if (typeof module !== "undefined") {
  module.exports = { splitQuery };
}
