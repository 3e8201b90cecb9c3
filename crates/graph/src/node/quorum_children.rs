//! The names of children that come and go: `children.0`, `children.1` of a quorum.

use vellum_options::Options;

pub(crate) const PREFIX: &str = "children.";

/// The number of a child, by what it is to its quorum.
pub(crate) fn child_number(role: &str) -> Option<u64> {
    let digits = role.strip_prefix(PREFIX)?;
    digits.parse().ok()
}

/// Numbers the children of a quorum without gaps, in their order, as one that is made must have them.
pub(crate) fn number_anew(options: &mut Options) {
    let number = |key: &str| {
        child_number(&format!(
            "{PREFIX}{}",
            key.strip_prefix(PREFIX)?.split('.').next()?
        ))
    };
    let mut old: Vec<u64> = options.keys().filter_map(number).collect();
    old.sort_unstable();
    old.dedup();
    for (new, old) in (0_u64..).zip(old).filter(|(new, old)| new != old) {
        let (new, old) = (format!("{PREFIX}{new}"), format!("{PREFIX}{old}"));
        match options.take(&old) {
            Some(reference) => options.set(&new, reference),
            None => {
                let group = options.take_group(&old);
                options.set_group(&new, group);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_no_gaps_where_a_quorum_is_described() {
        let text = "driver=quorum,vote-threshold=1,children.2=c,children.10.driver=raw,\
                    children.10.file=f,children.3=d";
        let mut options = Options::parse(text).unwrap();
        number_anew(&mut options);
        let wanted = "driver=quorum,vote-threshold=1,children.0=c,children.1=d,\
                      children.2.driver=raw,children.2.file=f";
        let wanted = Options::parse(wanted).unwrap();
        assert_eq!(options.to_json(), wanted.to_json());
    }
}
