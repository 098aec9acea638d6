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
