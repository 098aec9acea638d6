//! How much state the files of a folder share. State that one file guards can be understood, and
//! changed, by reading that file. State that others reach takes reading them all.
//!
//! The signs of it are counted, each with a limit that falls, or rises by what a feature needs.
//! docs/decisions.md ("Visibility") says which of them matters how much.

use super::source::{blanked, words};
use super::{say, written};

/// Fields that other files reach, of types that keep further fields to themselves: two owners of
/// one invariant.
const FIELDS_OF_HALF_OPEN_TYPES_MAX: usize = 128;

/// Fields that other files reach, of types that have no others. Such a record has no invariant:
/// its fields are its interface.
const FIELDS_OF_RECORDS_MAX: usize = 660;

/// `pub(super)`: the interfaces of types and modules towards their folder, and the fields above.
const VISIBLE_IN_FOLDER_MAX: usize = 1_415;

/// Blocks of methods that stand in another file than their type.
const IMPLS_ELSEWHERE_MAX: usize = 98;

#[test]
fn few_files_share_state() {
    let (mut half_open, mut records, mut visible, mut elsewhere) = (0, 0, 0, 0);
    for file in written().iter().filter(|file| file.is_rust()) {
        let source = blanked(&file.text);
        for shared in shared_fields(&source) {
            if shared.has_private_fields {
                half_open += shared.count;
                say(&format!("half open: {}: {}: {} fields", file.name, shared.of, shared.count));
            } else {
                records += shared.count;
            }
        }
        visible += source.matches("pub(super)").count();
        elsewhere += impls_elsewhere(&source).len();
    }
    let mut grown = Vec::new();
    for (count, most, of, remedy) in [
        (half_open, FIELDS_OF_HALF_OPEN_TYPES_MAX, "fields of half-open types", "make all fields private"),
        (records, FIELDS_OF_RECORDS_MAX, "fields of records", "let one file make and read the record"),
        (visible, VISIBLE_IN_FOLDER_MAX, "pub(super)", "keep it private to the file that needs it"),
        (elsewhere, IMPLS_ELSEWHERE_MAX, "impls elsewhere", "put methods beside their type"),
    ] {
        say(&format!("{of}: {count}, at most {most}"));
        if count > most {
            grown.push(format!("{of}: {count}, at most {most}; {remedy}"));
        }
    }
    assert!(grown.is_empty(), "more state is shared among files:\n{}", grown.join("\n"));
}

/// The fields of a type that other files reach.
#[derive(Debug, PartialEq, Eq)]
struct SharedFields {
    of: String,
    count: usize,
    /// The type also has fields that only its own file reaches.
    has_private_fields: bool,
}

/// The types of a file whose fields other files reach, in blanked source. Layouts that other
/// programs or the hardware prescribe (`repr`) do not count.
fn shared_fields(source: &str) -> Vec<SharedFields> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices("struct ") {
        let starts_word = source[..at].chars().next_back().is_none_or(|before| before.is_whitespace());
        let attributes = source[..at].rsplit(['}', ';']).next().unwrap_or_default();
        if !starts_word || attributes.contains("#[repr(") {
            continue;
        }
        let (mut count, mut has_private_fields) = (0, false);
        for field in fields(&source[at..]) {
            // Attributes come first.
            let field = field.rsplit(']').find(|part| part.contains("pub")).unwrap_or(field).trim();
            count += usize::from(field.starts_with("pub("));
            has_private_fields |= !field.starts_with("pub");
        }
        if count > 0 {
            let of = words(&source[at..]).nth(1).unwrap_or_default().to_owned();
            found.push(SharedFields { of, count, has_private_fields });
        }
    }
    found
}

/// The fields of the struct at the beginning of this source.
fn fields(source: &str) -> Vec<&str> {
    let Some(open) = source.find(['{', '(', ';']).filter(|open| !source[*open..].starts_with(';')) else {
        return Vec::new();
    };
    let (mut depth, mut start, mut fields) = (0, open + 1, Vec::new());
    for (at, char) in source.char_indices().skip_while(|(at, _)| *at < open) {
        match char {
            '{' | '(' | '[' | '<' => depth += 1,
            // The arrow of a function is no bracket.
            '>' if source[..at].ends_with('-') => {}
            '}' | ')' | ']' | '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 || (depth == 1 && char == ',') {
            fields.push(&source[start..at]);
            start = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    fields.retain(|field| !field.trim().is_empty());
    fields
}

/// The types of other files to which this file adds methods, in blanked source, one for each block.
fn impls_elsewhere(source: &str) -> Vec<String> {
    let defines = |name: &str| {
        ["struct", "enum", "union"].iter().any(|kind| {
            source.match_indices(&format!("{kind} {name}")).any(|(at, found)| {
                source[at + found.len()..].chars().next().is_none_or(|next| !is_of_name(next))
            })
        })
    };
    let blocks = source.match_indices("impl").filter(|(at, _)| {
        let line = source[..*at].rsplit('\n').next().unwrap_or_default();
        line.trim().is_empty() && !source[at + 4..].starts_with(is_of_name)
    });
    blocks
        .filter_map(|(at, _)| {
            let header = source[at + 4..].split(['{', ';']).next().unwrap_or_default();
            let of = after_generics(header.trim_start());
            let is_of_trait = words(of).any(|word| word == "for");
            let path = of.trim().split(|char: char| !is_of_name(char) && char != ':').next()?;
            let name = path.rsplit(':').next()?;
            (!is_of_trait && !name.is_empty() && !defines(name)).then(|| name.to_owned())
        })
        .collect()
}

fn is_of_name(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// The rest of a header behind its own generic parameters.
fn after_generics(header: &str) -> &str {
    let mut depth = 0;
    for (at, char) in header.char_indices() {
        match char {
            '<' => depth += 1,
            '>' if !header[..at].ends_with('-') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return if at == 0 { header } else { &header[at + 1..] };
        }
    }
    header
}

#[test]
fn the_measures_of_sharing_measure() {
    let source = "#[repr(C)]\nstruct Layout { pub(super) a: u8 }\n\
                  pub struct Open { pub(super) a: Map<u8, u8>, pub b: fn(u8) -> u8, pub(crate) c: [u8; 2] }\n\
                  struct Half<T> { #[cfg(test)] pub(super) a: u8, b: T }\nstruct Pair(pub(crate) u8, u8);\n\
                  struct Closed { a: u8 }\nstruct Nothing;\n";
    let shared =
        |of: &str, count, has_private_fields| SharedFields { of: of.to_owned(), count, has_private_fields };
    let expected = [shared("Open", 2, false), shared("Half", 1, true), shared("Pair", 1, true)];
    assert_eq!(shared_fields(source), expected);
    let source = "struct Own<T>(T);\nimpl<T: Fn() -> u8> Own<T> {}\nimpl super::Other<'_> {}\n\
                  impl Clone for Other {}\nimpl<const N: usize> Owner {}\n";
    assert_eq!(impls_elsewhere(source), ["Other", "Owner"]);
}
