//! `benches/report/`: what benches write, and what they take of values.

#[path = "../benches/report/mod.rs"]
mod report;

use report::{is_chosen, median, put_between, write_between};

const MARKS: [&str; 2] = ["<!-- measured: begin -->", "<!-- measured: end -->"];

const PAGE: &str = "# A page\n\n<!-- measured: begin -->\n| old |\n<!-- measured: end -->\n\nThe rest.\n";

#[test]
fn only_what_stands_between_the_marks_is_replaced() {
    let page = put_between(MARKS, "| new |\n| rows |\n", PAGE).expect("both marks are there");
    assert_eq!(page, PAGE.replace("| old |\n", "| new |\n| rows |\n"));
    assert_eq!(put_between(MARKS, "| old |\n", &page).as_deref(), Ok(PAGE));
}

#[test]
fn a_mark_that_is_missing_doubled_or_misplaced_is_named() {
    let [begin, end] = MARKS;
    for (page, said) in [
        (PAGE.replace(begin, ""), format!("it has no line '{begin}'")),
        (PAGE.replace(end, ""), format!("it has no line '{end}'")),
        (PAGE.replace("The rest.", begin), format!("it has '{begin}' 2 times")),
        (PAGE.replace("The rest.", end), format!("it has '{end}' 2 times")),
        (format!("{end}\n{begin}\n"), format!("'{end}' stands before '{begin}'")),
    ] {
        let error = put_between(MARKS, "| new |\n", &page).expect_err("marks are wrong");
        assert!(error.starts_with(&said), "{error}");
    }
}

#[test]
fn a_page_with_wrong_marks_is_left_as_it_is() {
    let path = std::env::temp_dir().join(format!("pleach-bench-report-{}.md", std::process::id()));
    std::fs::write(&path, "# A page\n").expect("a place for files");
    let error = write_between(MARKS, "| new |\n", &path).expect_err("no marks");
    assert!(error.starts_with(&path.display().to_string()), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("is there"), "# A page\n");
    std::fs::write(&path, PAGE).expect("a place for files");
    write_between(MARKS, "| new |\n", &path).expect("both marks are there");
    assert!(std::fs::read_to_string(&path).expect("is there").contains("begin -->\n| new |\n<!--"));
    std::fs::remove_file(&path).expect("is there");
}

#[test]
fn the_median_is_the_middle_value_or_the_greater_of_two() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 3.0);
}

#[test]
fn names_are_chosen_by_how_they_begin_and_all_without_a_choice() {
    let only = ["tcp".to_owned()];
    assert!(is_chosen(&only, "tcp2") && !is_chosen(&only, "shm2") && is_chosen(&[], "shm2"));
}
