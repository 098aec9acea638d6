//! As much of Rust as measuring takes: where comments and strings are, where functions begin and
//! end, and what names consist of.

/// Rust source with comments, strings and characters blanked, so that words and braces in them do
/// not count.
pub(crate) fn blanked(source: &str) -> String {
    let source: Vec<char> = source.chars().collect();
    let mut blank = String::with_capacity(source.len());
    let mut at = 0;
    while at < source.len() {
        let end = end_of_text(&source, at);
        if end == at {
            blank.push(source[at]);
            at += 1;
        } else {
            blank.extend(source[at..end].iter().map(|char| if *char == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    blank
}

/// Where the comment, string or character that begins at `at` ends; `at` when none begins there.
fn end_of_text(source: &[char], at: usize) -> usize {
    let next = |offset: usize| source.get(at + offset).copied().unwrap_or('\0');
    let in_word = at > 0 && (source[at - 1].is_alphanumeric() || source[at - 1] == '_');
    match (source[at], next(1)) {
        ('/', '/') => (at..source.len()).find(|end| source[*end] == '\n').unwrap_or(source.len()),
        ('/', '*') => end_of_block_comment(source, at),
        ('"', _) => end_of_quoted(source, at, '"'),
        ('r', '"' | '#') if !in_word => end_of_raw_string(source, at).unwrap_or(at),
        ('\'', '\\') => end_of_quoted(source, at, '\''),
        ('\'', char) if char != '\0' && next(2) == '\'' => at + 3,
        _ => at,
    }
}

fn end_of_quoted(source: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < source.len() && source[at] != quote {
        at += if source[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(source.len())
}

fn end_of_block_comment(source: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < source.len() {
        match (source[at], source.get(at + 1)) {
            ('/', Some('*')) => (at, depth) = (at + 2, depth + 1),
            ('*', Some('/')) => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

fn end_of_raw_string(source: &[char], start: usize) -> Option<usize> {
    let hashes = source[start + 1..].iter().take_while(|char| **char == '#').count();
    let open = start + 1 + hashes;
    if source.get(open) != Some(&'"') {
        return None;
    }
    let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let length = source[open + 1..].windows(close.len()).position(|window| window == close)?;
    Some(open + 1 + length + close.len())
}

/// Name, first line and number of lines of each function with a body, in blanked source.
pub(crate) fn functions(source: &str) -> Vec<(String, usize, usize)> {
    let mut functions = Vec::new();
    for (start, _) in source.match_indices("fn ") {
        let before = source[..start].chars().next_back();
        if before.is_some_and(|char| char.is_alphanumeric() || char == '_') {
            continue;
        }
        let name: String = source[start + 3..]
            .chars()
            .take_while(|char| char.is_alphanumeric() || "_$".contains(*char))
            .collect();
        if let Some(length) = body_end(&source[start..]) {
            let line = source[..start].lines().count().max(1);
            functions.push((name, line, source[start..start + length].lines().count()));
        }
    }
    functions
}

/// Length of a function from its `fn` to the end of its body; `None` where it has none.
fn body_end(source: &str) -> Option<usize> {
    let (mut depth, mut brackets) = (0, 0);
    for (at, char) in source.char_indices() {
        match char {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if depth == 0 && brackets == 0 => return None,
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 && brackets == 0 {
                    return Some(at + 1);
                }
                if depth < 0 {
                    return None;
                }
            }
            _ => {}
        }
    }
    None
}

pub(crate) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|char: char| !char.is_alphanumeric() && char != '_').filter(|word| !word.is_empty())
}

/// Kind and name of what a line defines, if anything.
pub(crate) fn defined(line: &str) -> Option<(String, String)> {
    const KINDS: [&str; 7] = ["fn", "struct", "enum", "trait", "mod", "type", "const"];
    let words: Vec<&str> = words(line).collect();
    let kind = words.iter().position(|word| KINDS.contains(word))?;
    // `const fn name` defines a function.
    let kind = if words.get(kind + 1) == Some(&"fn") { kind + 1 } else { kind };
    words.get(kind + 1).map(|name| (words[kind].to_owned(), (*name).to_owned()))
}

/// The words of `snake_case`, `CamelCase` and paths, in lower case.
pub(crate) fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut lower = false;
    for char in name.chars() {
        if !char.is_alphanumeric() || (char.is_uppercase() && lower) {
            words.push(String::new());
        }
        if char.is_alphanumeric() {
            words.last_mut().expect("never empty").extend(char.to_lowercase());
        }
        lower = char.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn the_measures_of_this_test_measure() {
    let source = "/* { fn no() { */ fn yes<'a>(x: &'a str) -> [u8; 2] {\n  // }\n  let _ = ('}', \"}\", r#\"}\"#);\n}\n\
                  trait T { fn without(&self); }\n";
    let blank = blanked(source);
    assert_eq!(blank.lines().count(), source.lines().count());
    assert_eq!(functions(&blank), [("yes".to_owned(), 1, 4)]);
    assert_eq!(name_words("transport/src/BufferManager_x"), ["transport", "src", "buffer", "manager", "x"]);
    assert_eq!(
        defined("pub(crate) const fn len(&self) -> usize {"),
        Some(("fn".to_owned(), "len".to_owned()))
    );
    assert!(words("unsafe_code(unsafe fn)").any(|word| word == "unsafe"));
    assert!(!words("allow(unsafe_code)").any(|word| word == "unsafe"));
}
