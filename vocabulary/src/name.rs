//! Values that are chosen by a name: on the command line, in files and in variables.

/// A name that no value of a kind has.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is no {what}; there are {known}")]
pub struct UnknownName {
    /// The kind of value, such as "reduction".
    pub what: &'static str,
    /// The name that was given.
    pub name: String,
    /// The names that exist, separated by spaces.
    pub known: String,
}

/// The value of `all` whose name is `name`.
///
/// # Errors
///
/// [`UnknownName`] with the names of all values.
pub fn named<T: Copy>(
    what: &'static str,
    all: &[T],
    name_of: fn(T) -> &'static str,
    name: &str,
) -> Result<T, UnknownName> {
    all.iter().copied().find(|&value| name_of(value) == name).ok_or_else(|| UnknownName {
        what,
        name: name.to_owned(),
        known: all.iter().map(|&value| name_of(value)).collect::<Vec<_>>().join(" "),
    })
}

/// The name that was probably meant by one that does not exist: the nearest, if few letters differ.
#[doc(hidden)]
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// One letter may differ in each group of this many letters.
    const LETTERS_A_MISTAKE: usize = 3;
    let near = known.filter_map(|known| {
        let longest = known.len().max(name.len());
        let distance = edit_distance(known, name);
        (distance <= longest.div_ceil(LETTERS_A_MISTAKE)).then_some((distance, known))
    });
    near.min().map(|(_, known)| known)
}

/// How many letters have to be put in, left out or replaced to make one word of the other.
fn edit_distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (number, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], number + 1);
        for (place, &another) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != another);
            diagonal = row[place + 1];
            row[place + 1] = replaced.min(row[place] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
