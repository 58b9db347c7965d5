"""The plain left-to-right longest match over a character trie: what the automaton must equal, and is timed against."""


class TrieNode:
    __slots__ = ("children", "term")

    def __init__(self):
        self.children, self.term = {}, None


def build_trie(terms):
    root = TrieNode()
    for term in terms:
        node = root
        for character in term:
            node = node.children.setdefault(character, TrieNode())
        node.term = term
    return root


def find(root, text):
    """(start, end, term) by DESIGN's rules: starts after white space or "(", ends before a non-alphanumeric."""
    found, i, size = [], 0, len(text)
    while i < size:
        if i and not (text[i - 1].isspace() or text[i - 1] == "("):
            i += 1
            continue
        node, best, j = root, None, i
        while j < size and text[j] in node.children:
            node = node.children[text[j]]
            j += 1
            if node.term is not None and (j == size or not text[j].isalnum()):
                best = (i, j, node.term)
        if best:
            found.append(best)
            i = best[1]
        else:
            i += 1
    return found
