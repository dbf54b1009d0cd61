// What an answer has that another one has not, word by word.

const MOST_CELLS = 4_000_000;

/** Return the words of an element that are shown as text, each with its text node and where it stands in it. */
function wordsOf(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest(".code-head")) continue;
    for (const match of node.data.matchAll(/\S+/g)) {
      found.push({ text: match[0], node, start: match.index, end: match.index + match[0].length });
    }
  }
  return found;
}

/**
 * Mark the words of an answer that the reference does not have.
 * Returns the number of the first word that differs, counted from 1, or 0 if all words are the same.
 */
export function markDifference(reference, other) {
  const ours = wordsOf(other), theirs = wordsOf(reference);
  let first = 0;
  while (first < ours.length && first < theirs.length && ours[first].text === theirs[first].text) first++;
  if (first === ours.length && first === theirs.length) return 0;
  let tail = 0;
  const most = Math.min(ours.length, theirs.length) - first;
  while (tail < most && ours.at(-1 - tail).text === theirs.at(-1 - tail).text) tail++;
  const middle = ours.slice(first, ours.length - tail);
  const common = inBoth(theirs.slice(first, theirs.length - tail), middle);
  mark(middle.filter((_, number) => !common.has(number)));
  return first + 1;
}

/** Return the numbers of the words in a longest common subsequence; none where the texts are too long for that. */
function inBoth(theirs, ours) {
  const found = new Set(), width = ours.length + 1;
  if (theirs.length * ours.length > MOST_CELLS) return found;
  const length = new Uint16Array((theirs.length + 1) * width);
  for (let row = theirs.length - 1; row >= 0; row--) {
    for (let column = ours.length - 1; column >= 0; column--) {
      length[row * width + column] = theirs[row].text === ours[column].text
        ? length[(row + 1) * width + column + 1] + 1
        : Math.max(length[(row + 1) * width + column], length[row * width + column + 1]);
    }
  }
  for (let row = 0, column = 0; row < theirs.length && column < ours.length;) {
    if (theirs[row].text === ours[column].text) {
      found.add(column++);
      row++;
    } else if (length[(row + 1) * width + column] >= length[row * width + column + 1]) row++;
    else column++;
  }
  return found;
}

/** Put words into mark elements, neighbours of one text node together. From the last, so that offsets stay right. */
function mark(words) {
  for (let at = words.length - 1; at >= 0; at--) {
    const end = words[at].end;
    while (at > 0 && words[at - 1].node === words[at].node && onlySpaceBetween(words[at - 1], words[at])) at--;
    const range = document.createRange();
    range.setStart(words[at].node, words[at].start);
    range.setEnd(words[at].node, end);
    range.surroundContents(document.createElement("mark"));
  }
}

const onlySpaceBetween = (before, after) => !before.node.data.slice(before.end, after.start).trim();
