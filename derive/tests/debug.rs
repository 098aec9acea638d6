//! What errors print by `Debug`.

use std::io;

use pleach_derive::ErrorDebug;

#[derive(ErrorDebug, thiserror::Error)]
enum Outer {
    #[error("no file: {name} ({source}); name another")]
    Named { name: String, source: Inner },
    #[error("not read")]
    Tuple(#[from] io::Error),
    #[error("nothing is there")]
    Unit,
}

#[derive(ErrorDebug, thiserror::Error)]
#[error("it is gone since {days} days")]
struct Inner {
    days: u32,
    formatter: (),
}

fn named() -> Outer {
    Outer::Named { name: "a".to_owned(), source: Inner { days: 3, formatter: () } }
}

#[test]
fn debug_is_the_message_with_the_sources_that_it_does_not_hold() {
    assert_eq!(format!("{:?}", named()), "no file: a (it is gone since 3 days); name another");
    let unread = Outer::from(io::Error::other("the disk burns"));
    assert_eq!(format!("{unread:?}"), "not read: the disk burns");
    assert_eq!(format!("{:?}", Outer::Unit), "nothing is there");
    let boxed: Box<dyn std::error::Error> = Box::new(unread);
    assert_eq!(format!("{boxed:?}"), "not read: the disk burns", "as a main prints what it returns");
}

#[test]
fn alternate_debug_is_the_fields() {
    let text = format!("{:#?}", named()).split_whitespace().collect::<String>();
    assert_eq!(text, "Named{name:\"a\",source:Inner{days:3,formatter:(),},}");
    assert_eq!(format!("{:#?}", Outer::Unit), "Unit");
    assert!(format!("{:#?}", Outer::from(io::Error::other("x"))).starts_with("Tuple(\n"));
}
