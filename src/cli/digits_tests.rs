//! Tests of [`super::digits`]: beside it, as other targets have that file too.

use std::io::Write as _;
use std::path::PathBuf;

use super::digits::{DataError, DataSet, Defect, Digits};

#[test]
fn the_built_in_digits_are_all_there_and_a_fifth_is_held_out() {
    let data = DataSet::built_in().expect("is whole");
    assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels()), (1438, 359, 64));
    for digits in [&data.train, &data.test] {
        assert!((0..10).all(|digit| (0..digits.len()).any(|index| digits.label(index) == digit)));
        assert!(
            (0..digits.len())
                .all(|index| digits.image(index).iter().all(|pixel| (0.0..=1.0).contains(pixel)))
        );
    }
}

/// A folder of its own that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-digits-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("can be made");
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("can be written");
    }

    /// `count` images of 2×2 with labels in turn.
    fn write_part(&self, part: &str, count: u32) {
        let pixels: Vec<u8> = (0..count * 4).map(|at| at as u8).collect();
        self.write(&format!("{part}-images-idx3-ubyte"), &file(0x803, &[count, 2, 2], &pixels));
        let labels: Vec<u8> = (0..count).map(|at| (at % 10) as u8).collect();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        packed.write_all(&file(0x801, &[count], &labels)).expect("fits memory");
        self.write(&format!("{part}-labels-idx1-ubyte.gz"), &packed.finish().expect("fits memory"));
    }

    fn defect(&self) -> Defect {
        match DataSet::from_folder(&self.0) {
            Err(DataError::Broken { defect, .. }) => defect,
            other => panic!("not broken: {other:?}"),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn file(magic: u32, shape: &[u32], values: &[u8]) -> Vec<u8> {
    let head = std::iter::once(&magic).chain(shape).flat_map(|number| number.to_be_bytes());
    head.chain(values.iter().copied()).collect()
}

#[test]
fn a_folder_with_the_test_files_only_is_split_and_with_all_four_is_not() {
    let folder = Folder::new("split");
    folder.write_part("t10k", 50);
    let data = DataSet::from_folder(&folder.0).expect("is whole");
    assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels()), (40, 10, 4));
    assert_eq!((data.test.label(0), data.test.image(0)[3]), (0, 163.0 / 199.0));
    folder.write_part("train", 20);
    let data = DataSet::from_folder(&folder.0).expect("is whole");
    assert_eq!((data.train.len(), data.test.len()), (20, 50));
}

#[test]
fn missing_files_are_named() {
    let folder = Folder::new("missing");
    let message = DataSet::from_folder(&folder.0).expect_err("is empty").to_string();
    assert!(message.contains("t10k-images-idx3-ubyte") && message.contains("leave --data away"), "{message}");
    folder.write_part("t10k", 10);
    folder.write("train-labels-idx1-ubyte", &file(0x801, &[1], &[1]));
    let message = DataSet::from_folder(&folder.0).expect_err("is incomplete").to_string();
    assert!(message.contains("train-images-idx3-ubyte"), "{message}");
    let folder = Folder::new("folder-for-file");
    folder.write("t10k-labels-idx1-ubyte", &file(0x801, &[1], &[1]));
    std::fs::create_dir(folder.0.join("t10k-images-idx3-ubyte")).expect("can be made");
    assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
}

#[test]
fn files_that_lie_are_refused_without_believing_their_sizes() {
    let folder = Folder::new("broken");
    folder.write_part("t10k", 10);
    let images = "t10k-images-idx3-ubyte";
    folder.write(images, &file(0x801, &[10, 2, 2], &[0; 40]));
    assert_eq!(folder.defect(), Defect::Magic(0x801, 0x803));
    folder.write(images, &file(0x803, &[u32::MAX, u32::MAX, u32::MAX], &[0; 40]));
    assert_eq!(folder.defect(), Defect::Large(u64::MAX));
    folder.write(images, &file(0x803, &[10, 2, 2], &[0; 39]));
    assert_eq!(folder.defect(), Defect::Length { promised: 40, present: 39 });
    folder.write(images, &file(0x803, &[10, 2, 2], &[0; 50]));
    assert_eq!(folder.defect(), Defect::Length { promised: 40, present: 41 });
    folder.write(images, &file(0x803, &[10, 0, 2], &[]));
    assert_eq!(folder.defect(), Defect::Empty);
    folder.write(images, &file(0x803, &[9, 2, 2], &[0; 36]));
    let message = DataSet::from_folder(&folder.0).expect_err("counts differ").to_string();
    assert!(message.contains("9 images") && message.contains("10 labels"), "{message}");
    folder.write(images, &[0, 0, 8]);
    assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
    folder.write_part("t10k", 10);
    folder.write("t10k-labels-idx1-ubyte", &file(0x801, &[10], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
    assert_eq!(folder.defect(), Defect::Label(10));
    std::fs::remove_file(folder.0.join("t10k-labels-idx1-ubyte")).expect("is there");
    folder.write("t10k-labels-idx1-ubyte.gz", b"not gzipped at all");
    assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
}

#[test]
fn squares_of_pixels_are_averaged_and_an_image_that_has_none_is_refused() {
    // Two images of two rows and four columns.
    let pixels = (0..16_u8).map(f32::from).collect();
    let digits = Digits::new(pixels, vec![3, 7], [2, 4]);
    let pooled = digits.pooled(2).expect("has squares");
    assert_eq!((pooled.image(0), pooled.image(1)), (&[2.5, 4.5][..], &[10.5, 12.5][..]));
    assert_eq!((pooled.label(0), pooled.label(1), pooled.image_pixels()), (3, 7, 2));
    assert_eq!(digits.pooled(1).expect("has squares").image(1), digits.image(1));
    assert!(digits.pooled(4).is_none() && digits.pooled(0).is_none());
    let message = DataSet::built_in().expect("is whole").pooled(3).expect_err("3 is no divisor").to_string();
    assert!(message.contains("3×3") && message.contains("8×8"), "{message}");
}
