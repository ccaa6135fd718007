// What the JavaScript scripts share.
export const QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?";
export const NUMBER = {
  type: "object",
  properties: { number: { enum: [7, 8] } },
  required: ["number"],
  additionalProperties: false,
};

export async function run(features) {
  const [url, model] = process.argv.slice(2);
  for (const [feature, check] of Object.entries(features)) {
    let reason = null;
    try {
      await check(url, model);
    } catch (error) {
      reason = `${error.name}: ${error.message}`.slice(0, 300);
    }
    console.log(JSON.stringify({ feature, works: reason === null, reason }));
  }
}
